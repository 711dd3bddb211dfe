"""Recipes on a handful of rows: a default that counts rows follows the data and says so, and what is set does not."""

import json
import re
from types import SimpleNamespace

import pytest
import videos
from conftest import flags

from hf_memopt import InputError
from hf_memopt.data.sources import load_rows
from hf_memopt.recipe.rows import fill_stream

# TRL 1.16 reads names that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

FORMS = {
    "pretrain": lambda n: {"text": f"Text number {n} is here."},
    "sft": lambda n: {"prompt": f"{n} plus {n} is", "completion": f" {2 * n}."},
    "dpo": lambda n: {"prompt": f"{n} plus {n} is", "chosen": f" {2 * n}.", "rejected": f" {2 * n + 1}."},
    "grpo": lambda n: {"prompt": f"{n} + {n} =", "completion": str(2 * n)},
}
LOADERS = {
    "pretrain": ("hf_memopt.recipe.rows", "load_texts"),
    "sft": ("hf_memopt.recipe.answers", "load_answers"),
    "dpo": ("hf_memopt.recipe.preference", "load_pairs"),
    "grpo": ("hf_memopt.recipe.prompts", "load_prompts"),
    "video_sft": ("hf_memopt.recipe.video", "load_samples"),
}


@pytest.fixture
def clips(tmp_path):
    """Makes a folder of clips with captions."""

    def make(count: int) -> str:
        folder = tmp_path / "clips"
        folder.mkdir()
        for number in range(count):
            videos.write(folder / f"{number}.mp4", videos.numbered(4))
            (folder / f"{number}.txt").write_text(f"Clip {number}.")
        return str(folder)

    return make


@pytest.fixture
def data(jsonl, clips):
    """Makes a data set of a recipe's form."""

    def make(name: str, count: int) -> str:
        return clips(count) if name == "video_sft" else jsonl([FORMS[name](number) for number in range(count)])

    return make


@pytest.fixture
def loaded(recipe, data, tmp_path, monkeypatch):
    """A recipe's rows and its TrainingArguments, as they are right before its weights are loaded."""
    import importlib

    from hf_memopt.recipe import job as jobs

    class Loaded(Exception):
        pass

    def load(name: str, count: int, *more):
        module, function = LOADERS[name]
        real, seen = getattr(importlib.import_module(module), function), []

        def recorded(job, *arguments):
            result = real(job, *arguments)
            seen[:] = [*result[:2], job.args]
            return result

        def stop(*_, **__):
            raise Loaded

        monkeypatch.setattr(f"{module}.{function}", recorded)
        monkeypatch.setattr(jobs, "load_model", stop)
        arguments = flags(preset="cpu", dataset_name=data(name, count), output_dir=tmp_path / "out")
        with pytest.raises(Loaded):
            recipe(name)([*arguments, *more])
        return seen

    return load


@pytest.mark.drawn(8)
@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("name", LOADERS)
def test_any_number_of_rows_is_loaded(name, count, loaded, capsys, caplog):
    train, held_out, args = loaded(name, count)
    assert len(train) >= 1 and (held_out is None or len(held_out) >= 1)
    assert (held_out is None) == (count == 1 or name == "grpo")
    if held_out is None:
        assert args.eval_strategy == "no" and not args.eval_on_start
    if count == 1 and name != "grpo":
        assert "note: held_out: the data have one row" in caplog.text
    if name == "video_sft" and count > 1:
        assert f"note: held_out: 1 of the {count} rows instead of 24" in caplog.text
        assert len(train) == count - 1


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", ["pretrain", "sft"])
def test_a_short_stream_fills_its_first_step(name, count, loaded, caplog):
    """The Trainer would begin empty epochs for ever."""
    train, _, args = loaded(name, count, "--streaming", "--max_steps", "2")
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert sum(1 for _ in train) > step - args.per_device_train_batch_size and step == 8
    assert "samples are repeated" in caplog.text


QUICK = {"preset": "cpu", "disable_tqdm": "true", "report_to": "none", "max_steps": 2}


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "count", "more"),
    [
        ("video_sft", 6, []),
        ("sft", 1, []),
        ("dpo", 3, []),
        ("pretrain", 1, []),
        ("pretrain", 2, ["--streaming"]),
        ("sft", 2, ["--streaming"]),
        ("grpo", 1, ["--max_completion_length", "4"]),
        ("sft", 2, ["--packing", "true"]),
    ],
)
def test_a_handful_of_rows_is_trained_on(name, count, more, recipe, data, tmp_path, capsys):
    out = tmp_path / "out"
    trainer = recipe(name)([*flags(**QUICK), "--dataset_name", data(name, count), "--output_dir", str(out), *more])
    assert trainer.state.global_step == 2
    report = json.loads((out / "memory_report.json").read_text())
    assert bool(report["held_out_loss"]) == (count > 1 and name != "grpo")
    losses = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    assert losses and all(loss == loss for loss in losses)


@pytest.mark.parametrize(
    ("name", "count", "more", "message"),
    [
        ("video_sft", 6, ["--held_out", "24"], "held_out=24.* leaves none of the 6 rows"),
        ("sft", 1, ["--held_out", "1"], "held_out=1.* leaves none of the 1 rows"),
        ("dpo", 3, ["--held_out", "0.9"], "held_out=0.9 leaves none of the 3 rows"),
        ("pretrain", 3, ["--max_length", "200"], "shorter than one block of 200 tokens"),
        ("sft", 2, ["--streaming", "--max_steps", "2", "--effective_batch_size", "8"], "streams 1 samples"),
        ("grpo", 4, ["--effective_batch_size", "4", "--num_generations", "3"], "must be divisible by num_generations"),
    ],
)
def test_what_the_user_set_is_refused(name, count, more, message, recipe, data, tmp_path):
    arguments = flags(preset="cpu", dataset_name=data(name, count), output_dir=tmp_path / "out")
    with pytest.raises(InputError, match=message):
        recipe(name)([*arguments, *more])
    assert not (tmp_path / "out").exists()


def _a_stream_lasts_for_a_step(count, drop_last, given, times):
    class Stream(list):
        def repeat(self, times):
            return self * times

    batch = {"per_device_train_batch_size": 2, "world_size": 2, "gradient_accumulation_steps": 3}
    args = SimpleNamespace(**batch, dataloader_drop_last=drop_last)
    job, samples = SimpleNamespace(args=args, given=set(given)), Stream(range(count))
    if times is None:
        with pytest.raises(InputError, match=f"streams {count} samples, and a step of 3 batches of 4 needs"):
            fill_stream(samples, job, "rows")
    else:
        assert fill_stream(samples, job, "rows") == [*range(count)] * times


def test_a_stream_lasts_for_a_step(subtests):
    """Of three batches of two samples on each of two processes; the last one may be short."""
    for count, drop_last, given, times in [
        (9, False, (), 1),
        (8, False, (), 2),
        (4, False, (), 3),
        (12, True, (), 1),
        (11, True, (), 2),
        (0, False, (), None),
        (8, False, ("effective_batch_size",), None),
        (8, False, ("learning_rate",), 2),
        (9, False, ("effective_batch_size",), 1),
    ]:
        with subtests.test(count=str(count), drop_last=str(drop_last)):
            _a_stream_lasts_for_a_step(count, drop_last, given, times)


def test_defaults_of_generation_follow_the_batch(loaded, caplog):
    for batch, generations in ((16, 8), (12, 6), (4, 4)):
        _, _, args = loaded("grpo", 6, "--effective_batch_size", str(batch))
        assert (args.num_generations, args.generation_batch_size) == (generations, batch)
    assert re.search("note: num_generations: 4, which divide the batch of 4", caplog.text)


def test_evaluation_generates_whole_groups(loaded):
    _, held_out, args = loaded("grpo", 6, *flags(eval_strategy="steps", held_out=2, effective_batch_size=4))
    assert len(held_out) == 2 and args.per_device_eval_batch_size % args.num_generations == 0


@pytest.mark.slow
def test_held_out_rows_without_an_answer_are_not_evaluated(recipe, jsonl, tmp_path, caplog):
    """The one row held out has its answer beyond max_length; the other one can be trained on."""
    long = {"prompt": "word " * 300, "completion": "lost"}
    _, held_out, _ = load_rows(jsonl([FORMS["sft"](0), FORMS["sft"](1)]))
    rows = [FORMS["sft"](0), long] if held_out[0]["prompt"].startswith("1") else [long, FORMS["sft"](1)]
    trainer = recipe("sft")(
        [*flags(**QUICK), "--dataset_name", jsonl(rows, "long.jsonl"), "--output_dir", str(tmp_path / "out")]
    )
    assert trainer.state.global_step == 2 and trainer.eval_dataset is None
    assert "note: held_out: no row of it has an answer within 256 tokens" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_a_batch_that_is_dropped_is_no_training(name, recipe, data, tmp_path):
    """The Trainer would end after no step, as if all were well; prompts are repeated to fill a batch."""
    more = ["--dataloader_drop_last", "true", "--output_dir", str(tmp_path / "out"), "--dataset_name", data(name, 2)]
    if name == "grpo":
        trainer = recipe(name)([*flags(**QUICK), *more, "--max_completion_length", "4"])
        assert trainer.state.global_step == 2
        return
    with pytest.raises(InputError, match="dataloader_drop_last drops all of the 1 rows, fewer than the batch of 4"):
        recipe(name)([*flags(**QUICK), *more])
    assert not (tmp_path / "out").exists()

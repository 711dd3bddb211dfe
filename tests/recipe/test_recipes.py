"""The recipes in this process: what they train, how they go on, and what they refuse."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, flags, run_forked, slow

from hf_memopt.errors import InputError
from hf_memopt.recipe.summary import _relative_errors

QUICK = flags(
    preset="cpu", samples=1, max_length=32, effective_batch_size=4, per_device_train_batch_size=2, held_out=8
)
QUESTIONS = [{"prompt": f"What is {n} plus {n}?", "completion": f" It is {2 * n}."} for n in range(40)]


@pytest.mark.parametrize("name", ["pretrain", "sft", "video_sft", "dpo", "grpo"])
def test_recipes_are_short_and_runnable_by_their_docstring(name):
    text = (ROOT / "recipes" / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 150
    commands = [line for line in text.split('"""')[1].splitlines() if "accelerate launch" in line]
    assert len(commands) >= 2
    for command in commands:
        words = command.split()
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("method", [slow("full"), slow("lora"), "qlora"])
def test_every_trainable_weight_gets_a_gradient(method, recipe, jsonl, tmp_path):
    """With activation checkpointing on, which is where adapters lose theirs."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for name, weight in model.named_parameters():
                if weight.requires_grad:
                    seen[name] = weight.grad is not None and bool(weight.grad.isfinite().all())

    seen: dict[str, bool] = {}
    arguments = [*QUICK, "--method", method, "--dataset_name", jsonl(QUESTIONS), "--output_dir", str(tmp_path / "out")]
    trainer = recipe("sft")([*arguments, "--dry_run", "--activation_checkpointing", "true", "--max_steps", "1"])
    assert trainer.args.activation_checkpointing_kwargs == {"use_reentrant": False}
    trainer.add_callback(Watch())
    trainer.train()
    assert seen and all(seen.values())
    if method != "full":
        assert all("lora_" in name for name in seen)


@pytest.mark.slow
def test_evaluation_does_not_change_gradients_of_a_4bit_model(recipe, jsonl, tmp_path):
    """bitsandbytes repacks 4-bit weights at evaluation on CPUs with AVX512-BF16, and loses the backward pass."""
    import torch

    arguments = flags(method="qlora", dataset_name=jsonl(QUESTIONS), output_dir=tmp_path / "out", max_steps=1)
    trainer = recipe("sft")([*QUICK, *arguments, "--dry_run"])
    model = trainer.model
    for name, weight in model.named_parameters():  # lora_B starts at zero, which would hide what lora_A gets
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])

    def gradients():
        model.train()
        model.zero_grad()
        model(**batch).loss.backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.requires_grad])

    before = gradients()
    model.eval()
    with torch.no_grad():
        model(**batch)
    after = gradients()
    assert torch.nn.functional.cosine_similarity(before, after, dim=0) > 0.9999


@pytest.mark.slow
def test_the_callback_names_weights_without_gradient(recipe, jsonl, tmp_path, caplog):
    from hf_memopt.recipe.callbacks import GradientCheck

    arguments = [*QUICK, "--dataset_name", jsonl(QUESTIONS), "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    trainer = recipe("sft")([*arguments, "--dry_run"])
    import torch

    trainer.model.unused = torch.nn.Linear(2, 2)
    trainer.add_callback(GradientCheck())
    trainer.train()
    assert "2 trainable parameters got no gradient" in caplog.text and "unused.weight" in caplog.text


@pytest.mark.slow
def test_pretraining_learns_and_reports(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    recipe("pretrain")([*QUICK, "--max_steps", "12", "--eval_steps", "6", "--output_dir", str(out)])
    report = json.loads((out / "memory_report.json").read_text())
    losses = {int(step): loss for step, loss in report["held_out_loss"].items()}
    assert list(losses) == [0, 6, 12]
    assert losses[0] == pytest.approx(math.log(4096), abs=0.3), "random weights know nothing"
    assert losses[12] < losses[0] - 0.3
    assert report["measured"]["peak_host_bytes"] > 2**27 and report["versions"]["torch"]
    predicted = report["estimate"]["peak_allocated_bytes"]
    assert predicted == pytest.approx(report["measured"]["peak_allocated_bytes"], rel=0.01)
    assert report["measured"]["phases"].keys() == {"forward", "backward", "optimizer"}
    for phase, peak in report["measured"]["phases"].items():
        assert report["estimate"]["phases"][phase] == pytest.approx(peak, rel=0.01), phase
    assert abs(report["relative_error"]["peak_allocated_bytes"]) < 0.01 and report["memory_arguments"]
    assert 0 <= report["data_wait_share"] < 1
    assert max(size for _, size in report["predicted_timeline"]) == predicted
    page = (out / "memory_report.html").read_text()
    assert "Ran 12 steps" in page and "Predicted and measured" in page
    printed = capsys.readouterr().out
    assert "predicted" in printed and "difference" in printed and "memory_report.html" in printed
    assert "held-out loss" in printed and "→" in printed and "= 4 samples a step" in printed
    assert (out / "model.safetensors").is_file() and (out / "tokenizer.json").is_file()
    assert json.loads((out / "config.json").read_text())["use_cache"] is True, "a saved model generates quickly"


@pytest.mark.parametrize("method", [slow("full"), slow("lora")])
def test_a_run_can_be_repeated(method, recipe, jsonl, tmp_path):
    """Random weights, adapters and order come from --seed alone."""
    texts = jsonl([{"text": f"What is {n} plus {n}? It is {2 * n}."} for n in range(80)])
    arguments = [*QUICK, "--method", method, "--dataset_name", texts, "--max_steps", "2", "--samples", "0"]
    losses = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        out = tmp_path / name
        recipe("pretrain")([*arguments, "--seed", seed, "--output_dir", str(out)])
        losses.append(json.loads((out / "memory_report.json").read_text())["held_out_loss"]["2"])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
def test_command_line_over_file_over_preset(recipe, tmp_path, builtin_model):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"learning_rate: 1e-4\nweight_decay: 0.5\noptim: adafactor\nmodel_name_or_path: {builtin_model}\n"
        "method: lora\nlora:\n  r: 4\n  lora_alpha: 4\nactivation_checkpointing: true\n"
        "activation_checkpointing_kwargs:\n  every_n_layers: 2\nlogging_steps: 7\nload_best_model_at_end: false\n"
    )
    arguments = ["--preset", "cpu", "--config", str(config), "--weight_decay", "0.25", "--lora.r", "8", "--dry_run"]
    trainer = recipe("sft")([*arguments, "--output_dir", str(tmp_path / "out")])
    args = trainer.args
    assert (args.learning_rate, args.weight_decay, args.optim.value) == (1e-4, 0.25, "adafactor")
    assert args.logging_steps == 7 and args.activation_checkpointing_kwargs["every_n_layers"] == 2
    lora = trainer.model.peft_config["default"]
    assert (lora.r, lora.lora_alpha) == (8, 4)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 8
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_prediction_beside_the_measured_peak_is_of_the_same_batch(recipe, tmp_path, capsys):
    """The built-in questions are of many lengths, and the longest do not come in the first steps."""
    out = tmp_path / "out"
    arguments = ["--preset", "cpu", "--max_steps", "2", "--samples", "0", "--held_out", "8", "--output_dir", str(out)]
    recipe("sft")(arguments)
    report = json.loads((out / "memory_report.json").read_text())
    measured, same = report["measured"]["peak_allocated_bytes"], report["estimate_of_measured_batch"]
    assert same["peak_allocated_bytes"] == pytest.approx(measured, rel=0.001)
    assert report["estimate"]["peak_allocated_bytes"] > 1.5 * measured, "the longest samples are the run's limit"
    assert abs(report["relative_error"]["peak_allocated_bytes"]) < 0.001
    for phase, peak in report["measured"]["phases"].items():
        assert same["phases"][phase] == pytest.approx(peak, rel=0.01), phase
    samples, tokens = report["measured_batch"].removesuffix(" tokens").split(" × ")
    assert samples == "4"
    assert f"{tokens} tokens" in (out / "memory_report.html").read_text()
    assert "longest" in capsys.readouterr().out


@pytest.mark.slow
def test_levers_and_packing(recipe, jsonl, tmp_path, capsys):
    """Arguments of the recipe, told before it runs, and predicted."""
    rows = [{"prompt": f"{n}?", "completion": f" {2 * n}."} for n in range(200)]
    arguments = [*QUICK, "--dataset_name", jsonl(rows), "--output_dir", str(tmp_path / "out"), "--max_steps", "2"]
    levers = ["--checkpoint_ratio", "0.5", "--activation_compression", "int8"]
    trainer = recipe("sft")([*arguments, "--packing", "true", *levers, "--adam_mini", "true"])
    assert len(trainer.train_dataset) < 192 / 1.5 and "seq_lengths" in trainer.train_dataset.column_names
    assert type(trainer.optimizer.optimizer).__name__ == "AdamMini"
    said = capsys.readouterr().out
    assert "levers  activation_compression=int8, checkpoint_ratio=0.5, adam_mini=True" in said
    report = json.loads((tmp_path / "out" / "memory_report.json").read_text())
    predicted, measured = report["estimate"]["peak_allocated_bytes"], report["measured"]["peak_allocated_bytes"]
    assert predicted == pytest.approx(measured, rel=0.03)


@pytest.mark.slow
def test_streaming(recipe, jsonl, tmp_path):
    path = jsonl([{"text": f"line {number} of a text that is streamed"} for number in range(200)])
    arguments = [*QUICK, "--dataset_name", path, "--streaming", "--shuffle_buffer_size", "20", "--max_steps", "3"]
    trainer = recipe("pretrain")([*arguments, "--output_dir", str(tmp_path / "out")])
    assert trainer.state.global_step == 3


@pytest.mark.slow
def test_no_rows_held_out(recipe, jsonl, tmp_path):
    arguments = [*QUICK[:-2], "--held_out", "0", "--dataset_name", jsonl(QUESTIONS), "--max_steps", "1"]
    trainer = recipe("sft")([*arguments, "--output_dir", str(tmp_path / "out")])
    assert trainer.state.global_step == 1 and trainer.eval_dataset is None


@pytest.mark.slow
def test_a_failing_evaluation_costs_no_weights(recipe, jsonl, tmp_path, monkeypatch):
    """The trained model is saved before the last evaluation, in which anything may fail."""
    from hf_memopt import MemoryTrainerMixin

    def fails(trainer):
        config = trainer.model.config
        assert config.use_cache is False, "evaluation keeps no keys and values"
        raise OSError("the disk of the held-out data is gone")

    monkeypatch.setattr(MemoryTrainerMixin, "evaluate", fails, raising=False)
    out = tmp_path / "out"
    arguments = [*QUICK, "--dataset_name", jsonl(QUESTIONS), "--output_dir", str(out), "--max_steps", "1"]
    with pytest.raises(OSError, match="held-out data"):
        recipe("sft")([*arguments, "--eval_strategy", "no", "--eval_on_start", "false"])
    assert (out / "model.safetensors").is_file()
    assert json.loads((out / "config.json").read_text())["use_cache"] is True


RESUMED = ("--resume_from_checkpoint", "true")


@pytest.mark.slow
def test_it_resumes_from_the_newest_checkpoint_that_is_intact(recipe, jsonl, tmp_path, caplog):
    out = tmp_path / "out"
    saving = flags(save_strategy="steps", save_steps=2, eval_strategy="no", eval_on_start="false")
    arguments = [*QUICK, *flags(dataset_name=jsonl(QUESTIONS), output_dir=out), *saving]
    recipe("sft")([*arguments, "--max_steps", "4"])
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    measured = json.loads((out / "memory_report.json").read_text())["measured"]["peak_allocated_bytes"]
    resumed = recipe("sft")([*arguments, "--max_steps", "6", *RESUMED])
    peak = json.loads((out / "memory_report.json").read_text())["measured"]["peak_allocated_bytes"]
    assert peak == pytest.approx(measured, rel=0.02), "states that were loaded count as those that were made"
    logged = [entry["step"] for entry in resumed.state.log_history]
    assert resumed.state.global_step == 6 and min(logged) >= 4

    last, before = out / "checkpoint-6", out / "checkpoint-4"
    weights = (last / "model.safetensors").read_bytes()
    (last / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(InputError, match=r"checkpoint-6 is damaged \(model.safetensors has .*name checkpoint-4"):
        recipe("sft")([*arguments, "--max_steps", "8", "--resume_from_checkpoint", str(last)])
    (last / "trainer_state.json").unlink()
    caplog.clear()
    recipe("sft")([*arguments, "--max_steps", "6", *RESUMED])
    assert "resuming from checkpoint-4 instead" in caplog.text and "(step 4 of 6)" in caplog.text
    for checkpoint in (last, before):
        (checkpoint / "rng_state.pth").unlink()
    with pytest.raises(
        InputError, match=r"no checkpoint that is intact \(checkpoint-6: no rng_state.pth; checkpoint-4"
    ):
        recipe("sft")([*arguments, "--max_steps", "8", *RESUMED])
    fresh = recipe("sft")([*arguments, "--max_steps", "6", "--resume_from_checkpoint", "no", "--overwrite"])
    assert fresh.state.global_step == 6
    named = recipe("sft")([*arguments, "--max_steps", "6", "--resume_from_checkpoint", str(before)])
    assert named.state.global_step == 6
    fresh = recipe("sft")([*arguments, "--max_steps", "1", "--resume_from_checkpoint", "no", "--overwrite"])
    assert fresh.state.global_step == 1


@pytest.mark.drawn(10)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "rtx_4009"], "Did you mean 'rtx_4090'"),
        (["--method", "qlra"], "Did you mean 'qlora'"),
        (["--learning_rat", "1"], "Did you mean 'learning_rate'"),
        (["--learning_rate", "fast"], "learning_rate"),
        (["--max_length", "1024"], "more than the 512 positions"),
        (["--optim", "adamw_9bit"], "adamw_9bit"),
        (["--streaming", "--max_steps", "-1"], "set max_steps"),
        (["--model_name_or_path", "nowhere/model", "--dataset_name", "builtin:questions"], "model 'nowhere/model': "),
        (["--model_name_or_path", "Qwen/Qwen3-8B"], "model 'Qwen/Qwen3-8B' needs your data: pass --dataset_name"),
        (["--config_name", "gpt2"], "only the built-in model trains on built-in data"),
        (["--config_name", "gpt2", "--method", "lora"], "needs trained weights"),
        (["--lora.rr", "8", "--method", "lora"], "unknown key of lora 'rr'"),
        (["--lora.r", "8"], "applies to method=lora"),
        (["--quantization.bnb_4bit_quant_typ", "fp4", "--method", "qlora"], "Did you mean 'bnb_4bit_quant_type'"),
        (["--activation_checkpointing_kwargs", '{"use_rentrant": false}'], "Did you mean 'use_reentrant'"),
        (["--resume_from_checkpoint", "nowhere"], "nowhere is not a folder"),
        (["--resume_from_checkpoint", "true"], "holds no checkpoint-N"),
        (["--config", "nowhere.yaml"], "no such file"),
        (["--bf16", "true", "--fp16", "true"], "fp16 and bf16"),
        (["--effective_batch_size", "7", "--per_device_train_batch_size", "2"], "does not divide"),
        slow(["--attn_implementation", "flash_attention_2"], "use attn_implementation='sdpa'"),
        (["--held_out", "-1"], "held_out"),
        (["--dtype", "bfloat"], "Did you mean 'bfloat16'"),
    ],
)
def test_bad_arguments_are_one_sentence_and_write_nothing(arguments, message, recipe, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(InputError, match=message) as caught:
        recipe("sft")(["--preset", "cpu", "--output_dir", str(out), *arguments])
    assert len(str(caught.value).splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("trl", "answers", "predicted"), [(False, False, "(1, 7)"), (True, False, None), (True, True, "its batch")]
)
def test_a_batch_that_ran_is_predicted_where_its_trainer_is_known(trl, answers, predicted, monkeypatch):
    from hf_memopt.recipe import prediction

    monkeypatch.setattr(prediction, "trl_trainer", lambda trainer: trl)
    monkeypatch.setattr(prediction, "tunes_answers", lambda trainer: answers)
    monkeypatch.setattr(prediction, "_estimate", lambda job, trainer, length, batch, **about: f"(1, {length})")
    monkeypatch.setattr(prediction, "_estimate_trainer", lambda job, trainer, batch: "its batch")
    monkeypatch.setattr(prediction, "_in_state", lambda estimate, batch: estimate)
    job, batch = SimpleNamespace(recipe=None), SimpleNamespace(shape=(1, 7))
    assert prediction.predict_batch(job, None, "before", batch) == predicted
    assert prediction.predict_batch(job, None, None, batch) is None
    assert prediction.predict_batch(job, None, "before", None) is None


@pytest.mark.parametrize(
    ("rows", "batches", "drop_last", "words"),
    [
        (None, 1, False, "2 × 3 × 1 = 6 samples a step"),
        (60, 1, False, "2 × 3 × 1 = 6 samples a step"),
        (61, 1, False, "2 × 3 × 1 = 6 samples a step, 1 in the last of an epoch"),
        (6, 1, False, "2 × 3 × 1 = 6 samples a step"),
        (5, 1, False, "2 × 3 × 1 = 6, and the data have 5 rows: 5 samples a step"),
        (5, 1, True, "2 × 3 × 1 = 6, and the data have 5 rows: 4 samples a step"),
        (
            5,
            2,
            False,
            "2 × 3 × 2 = 12, and the data have 5 rows: 8 samples a step, some of them twice over 2 processes",
        ),
        (13, 2, False, "2 × 3 × 2 = 12 samples a step, 4 in the last of an epoch"),
    ],
)
def test_the_samples_of_a_step_in_words(rows, batches, drop_last, words):
    from hf_memopt.recipe.summary import _step

    args = SimpleNamespace(train_batch_size=2, gradient_accumulation_steps=3, dataloader_drop_last=drop_last)
    data = iter(()) if rows is None else range(rows)
    assert _step(SimpleNamespace(args=args, train_dataset=data, batches=batches)) == words


def test_only_the_built_in_model_needs_no_data(tmp_path):
    from hf_memopt.recipe.defaults import RecipeDefaults, check_data
    from hf_memopt.recipe.recipe_arguments import RecipeArguments

    defaults = RecipeDefaults(model=lambda: tmp_path / "own")
    (tmp_path / "own").mkdir()
    check_data(RecipeArguments(), defaults)
    check_data(RecipeArguments(model_name_or_path=str(tmp_path / "own" / ".." / "own")), defaults)
    check_data(RecipeArguments(model_name_or_path=str(tmp_path), dataset_name="rows.jsonl"), defaults)
    for others in (str(tmp_path), str(tmp_path / "missing"), "gpt2"):
        with pytest.raises(InputError, match="needs your data"):
            check_data(RecipeArguments(model_name_or_path=others), defaults)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1\n", "Did you mean 'learning_rate'"),
        ("learning_rate: fast\n", "learning_rate: 'fast' is not valid"),
        ("lora:\n  lora_alfa: 3\nmethod: lora\n", "Did you mean 'lora_alpha'"),
        ("activation_checkpointing_kwargs:\n  every_n_layer: 2\n", "Did you mean 'every_n_layers'"),
        ("- a\n", "holds no"),
        ("a: [\n", "run.yaml"),
        ("lora: 8\n", "must be a mapping"),
    ],
)
def test_bad_config_files(text, message, recipe, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        recipe("sft")(["--preset", "cpu", "--config", str(tmp_path / "run.yaml"), "--output_dir", str(tmp_path / "o")])
    assert not (tmp_path / "o").exists()


NEVER_FITS = """
import functools, runpy, sys, torch, transformers
forward, calls = transformers.LlamaForCausalLM.forward, []
@functools.wraps(forward)
def full(self, *args, **kwargs):
    calls.append(self.training)
    if sum(calls) > 10:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return forward(self, *args, **kwargs)
transformers.LlamaForCausalLM.forward = full
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_recipe_that_runs_out_of_memory_ends_with_75(tmp_path):
    """The code for relaunchers, a diagnosis without a traceback, both reports, and a checkpoint of the last step."""
    (tmp_path / "never_fits.py").write_text(NEVER_FITS)
    out = tmp_path / "out"
    done = run_forked(
        "python",
        tmp_path / "never_fits.py",
        ROOT / "recipes" / "pretrain.py",
        *flags(preset="cpu", max_steps=8, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_length=32),
        *flags(eval_strategy="no", eval_on_start="no", output_dir=out),
    )
    assert done.returncode == 75, done.stderr[-2000:]
    assert "Traceback" not in done.stderr and "out of memory in forward of step" in done.stderr
    ended = json.loads((out / "oom_report.json").read_text())
    assert ended["step"] > 0 and ended["checkpoint"] == str(out / f"checkpoint-{ended['step']}")
    assert json.loads((out / "memory_report.json").read_text())["events"][-1]["event"] == "out_of_memory"
    assert (Path(ended["checkpoint"]) / "trainer_state.json").is_file() and (out / "memory_report.html").is_file()


@pytest.mark.slow
def test_help_shows_the_commands():
    done = run_forked("python", ROOT / "recipes" / "pretrain.py", "--help")
    assert done.returncode == 0 and "accelerate launch --config_file" in done.stdout
    assert "--shuffle_buffer_size" in done.stdout and "--lora.KEY" in done.stdout


@pytest.mark.slow
def test_the_script_in_the_docs(builtin_model, jsonl, tmp_path):
    script = ROOT / "docs" / "preset_in_your_script.py"
    code = [line for line in script.read_text().splitlines() if line and not line.startswith(("import", "from"))]
    assert len(code) <= 10
    texts = jsonl([{"text": "a line of text"}] * 16)
    done = run_forked("python", script, builtin_model, texts, 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'train_loss'" in done.stdout + done.stderr
    assert list(Path(tmp_path, "out").glob("checkpoint-2/model.safetensors"))


def test_errors_are_relative_to_what_was_measured():
    estimated = SimpleNamespace(a=3, b=1, c=5, d=0)
    assert _relative_errors(estimated, {"a": 2, "b": 4, "c": 0, "d": 1, "e": 1}) == {"a": 0.5, "b": -0.75}

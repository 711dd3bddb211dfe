"""Batch settings of a recipe: what was given decides, profiles and presets are defaults; what is printed."""

import itertools
import re

import pytest
from conftest import flags

from hf_memopt.errors import InputError
from hf_memopt.recipe.defaults import check_recipe
from hf_memopt.recipe.job import RecipeDefaults, start
from hf_memopt.recipe.recipe_arguments import RecipeArguments
from hf_memopt.recipe.video import VideoArguments
from hf_memopt.video.demo_model import builtin_video_model

MICRO, ACCUMULATION, EFFECTIVE = "per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size"


def begun(tmp_path, *arguments, video=True, config=None):
    """The batch that a recipe starts with, and its job."""
    more = {"arguments": VideoArguments, "model": builtin_video_model} if video else {}
    if config:
        (tmp_path / "run.yaml").write_text("".join(f"{name}: {value}\n" for name, value in config.items()))
        arguments = [*arguments, "--config", tmp_path / "run.yaml"]
    defaults = RecipeDefaults(training={"output_dir": str(tmp_path / "out")}, **more)
    job = start(defaults, ["--preset", "cpu", *map(str, arguments)])
    return (job.args.per_device_train_batch_size, job.args.gradient_accumulation_steps), job


@pytest.mark.parametrize("video", [False, True])
@pytest.mark.parametrize(("micro", "accumulation"), [(4, 8), (4, 3), (1, 1), (6, 5)])
def test_both_given_define_the_effective_batch(micro, accumulation, video, tmp_path):
    given = (f"--{MICRO}", micro, f"--{ACCUMULATION}", accumulation)
    assert begun(tmp_path, *given, video=video)[0] == (micro, accumulation)
    config = {MICRO: micro, ACCUMULATION: accumulation}
    assert begun(tmp_path, video=video, config=config)[0] == (micro, accumulation)


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        ({}, (4, 8)),
        ({MICRO: 2}, (2, 16)),
        ({ACCUMULATION: 2}, (16, 2)),
        ({EFFECTIVE: 6}, (3, 2)),  # 4, the profile's, does not divide it
        ({EFFECTIVE: 16, MICRO: 2}, (2, 8)),
        ({EFFECTIVE: 12, MICRO: 4, ACCUMULATION: 3}, (4, 3)),
    ],
)
def test_a_profile_s_batch_is_a_default(given, batch, tmp_path):
    found, job = begun(tmp_path, *(word for name, value in given.items() for word in (f"--{name}", value)))
    assert found == batch
    assert job.args.per_device_eval_batch_size == batch[0]


def test_only_what_was_given_can_contradict(tmp_path):
    with pytest.raises(InputError, match=r"effective_batch_size=32 is not .* 4 × .* 3 × 1 .*effective_batch_size=12"):
        begun(tmp_path, f"--{EFFECTIVE}", 32, f"--{MICRO}", 4, f"--{ACCUMULATION}", 3)


@pytest.mark.parametrize(
    ("line", "batch"),
    [
        ({EFFECTIVE: 64, MICRO: 2}, (2, 32)),
        ({EFFECTIVE: 16}, (8, 2)),
        ({MICRO: 2, ACCUMULATION: 3}, (2, 3)),
        ({MICRO: 2}, (2, 32)),
    ],
)
def test_the_command_line_goes_over_the_file(line, batch, tmp_path):
    """As with an exported folder, whose file has a whole batch."""
    words = (word for name, value in line.items() for word in (f"--{name}", value))
    assert begun(tmp_path, *words, video=False, config={MICRO: 8, ACCUMULATION: 8, EFFECTIVE: 64})[0] == batch


def test_what_a_profile_changes_is_told(tmp_path):
    _, job = begun(tmp_path, "--video_profile", "maximum_savings")
    assert job.profile == (
        "maximum_savings: per_device_train_batch_size 2 (the preset has 4), effective_batch_size 32 (8), "
        "activation_checkpointing True (False)"
    )
    _, job = begun(tmp_path, f"--{MICRO}", 8, f"--{EFFECTIVE}", 8, "--activation_checkpointing", "false")
    assert job.profile is None


def test_old_names_win_over_a_profile(tmp_path):
    own = ["--model_name_or_path", builtin_video_model(), "--max_frames", "none"]
    _, job = begun(tmp_path, "--gradient_checkpointing", "false", *own)
    assert not job.args.activation_checkpointing


QUICK = ["--preset", "cpu", "--max_length", "32", "--held_out", "0", "--dry_run"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        (2, [], "4 × 8 × 1 = 32, and the data have 2 rows: 2 samples a step, up to 32 tokens each"),
        (70, [], "4 × 8 × 1 = 32 samples a step, 6 in the last of an epoch, up to 32 tokens each"),
        (70, ["--dataloader_drop_last", "true"], "= 32 samples a step, 4 in the last of an epoch, up to"),
        (64, [], "4 × 8 × 1 = 32 samples a step, up to 32 tokens each"),
    ],
)
def test_the_first_lines_say_what_a_step_takes(rows, more, said, recipe, jsonl, tmp_path, capsys):
    data = jsonl([{"prompt": f"{n}?", "completion": f" {n}."} for n in range(rows)])
    recipe("sft")(
        [
            *QUICK,
            *more,
            *flags(dataset_name=data, output_dir=tmp_path / "out"),
            f"--{MICRO}",
            "4",
            f"--{ACCUMULATION}",
            "8",
        ]
    )
    printed = capsys.readouterr().out
    assert said in re.search(r"batch  (.*)", printed)[1], printed


def test_the_last_step_by_the_real_loader():
    """Against accelerate's own shards of a loader, as the Trainer makes them."""
    import torch
    from accelerate.data_loader import BatchSamplerShard

    from hf_memopt.recipe.summary import last_step

    for rows, micro, accumulation, batches, drop_last in itertools.product(
        range(1, 40), (1, 2, 5), (1, 3), (1, 2, 4), (False, True)
    ):
        sampler = torch.utils.data.BatchSampler(range(rows), micro, drop_last)
        shards = [list(sampler)]  # which accelerate leaves alone on one process
        if batches > 1:
            shards = [list(BatchSamplerShard(sampler, batches, rank)) for rank in range(batches)]
        steps = -(-len(shards[0]) // accumulation)
        last = [batch for shard in shards for batch in shard[(steps - 1) * accumulation :]] if steps else []
        found = last_step(rows, micro, accumulation, batches, drop_last)
        assert found == (steps, sum(map(len, last))), (rows, micro, accumulation, batches, drop_last)


def test_a_stream_needs_its_number_of_steps():
    recipe = RecipeArguments(streaming=True)
    for steps in (None, 0, -1):
        with pytest.raises(InputError, match="a stream has no known length: set max_steps"):
            check_recipe(recipe, {"max_steps": steps})
    check_recipe(recipe, {"max_steps": 1})
    check_recipe(RecipeArguments(), {})

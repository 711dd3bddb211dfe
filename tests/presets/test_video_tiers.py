"""The clips that are predicted to fit: the rule, the file of every preset, and what the video recipe makes of them."""

import dataclasses
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import video_models
import videos
from conftest import flags
from transformers import TrainerState

from hf_memopt import get_preset, list_presets
from hf_memopt.errors import InputError
from hf_memopt.estimator import architectures
from hf_memopt.estimator.api import estimate_job
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.planner.samples.video_tiers import (
    Clip,
    FixedLimits,
    NothingFits,
    Tier,
    TierLimits,
    bundled_video_models,
    choose_tier,
    guide_row,
    ranked_clips,
    tier_job,
    wanted_clips,
    with_clip,
)
from hf_memopt.presets import METHODS
from hf_memopt.presets.tier_file import all_tiers, tiers_of
from hf_memopt.recipe import auto, video, video_tier
from hf_memopt.recipe import job as jobs
from hf_memopt.units import GIB

# ---- the rule


def test_frames_come_first_then_their_size_then_the_micro_batch():
    clips = list(ranked_clips(8 * GIB, 32, FixedLimits()))
    assert clips[:6] == [
        Clip(75, 448, 4),
        Clip(75, 448, 2),
        Clip(75, 336, 4),
        Clip(75, 336, 2),
        Clip(75, 224, 4),
        Clip(75, 224, 2),
    ]
    assert clips[6:8] == [Clip(75, 224, 1), Clip(50, 448, 4)] and clips[-1] == Clip(8, 224, 1)
    assert {clip.micro_batch for clip in ranked_clips(80 * GIB, 12, FixedLimits())} == {12, 6, 4, 3, 2, 1}


def test_a_limit_below_every_clip_leaves_the_shortest():
    """The encoder drops frames to keep to it, so that such a job works."""
    job = tier_job(get_preset("rtx_4090", "qlora"), architectures.load_config("qwen2.5-vl-3b"))
    memory = get_preset("rtx_4090").hardware.memory
    shortest = wanted_clips(job, memory, TierLimits(longest=8))
    assert {(clip.frames, clip.side) for clip in shortest} == {(8, 224)}
    assert [clip.micro_batch for clip in shortest] == [16, 8, 4, 2, 1]
    assert shortest == wanted_clips(job, memory, TierLimits(longest=64))
    assert {clip.frames for clip in wanted_clips(job, memory, TierLimits(longest=700))} == {16, 8}
    assert wanted_clips(job, memory, TierLimits(longest=8, fixed=FixedLimits(max_frames=12)))[0].frames == 12


def test_an_evaluation_that_was_given_is_estimated_too():
    config, preset = architectures.load_config("qwen2.5-vl-3b"), get_preset("rtx_4090", "qlora")
    given = tier_job(preset, config, training={"per_device_eval_batch_size": 64, "eval_strategy": "steps"})
    fields = with_clip(given, Clip(8, 224, 2), 32).fields
    assert (fields["per_device_train_batch_size"], fields["per_device_eval_batch_size"]) == (2, 64)
    assert fields["eval_strategy"] == "steps"
    usual = with_clip(tier_job(preset, config, training={"eval_strategy": "steps"}), Clip(8, 224, 2), 32).fields
    assert (usual["per_device_eval_batch_size"], usual.get("eval_strategy", "no")) == (2, "no")


@pytest.mark.slow
def test_the_choice_fits_and_the_one_before_does_not(tmp_path):
    folder = video_models.make("qwen3_vl", tmp_path, weights=False)
    config = architectures.load_config(str(folder))
    settings = {"size": {"shortest_edge": 784, "longest_edge": 10**7}}
    job = tier_job(get_preset("cpu"), config)
    job = dataclasses.replace(job, video=dataclasses.replace(job.video, settings=settings))
    wanted = list(ranked_clips(16 * GIB, 32, FixedLimits()))
    sixth = estimate_job(with_clip(job, wanted[6], 32)).device_bytes
    assert sixth < estimate_job(with_clip(job, wanted[5], 32)).device_bytes
    tier = choose_tier(job, TierLimits(memory=16 * GIB, share=(sixth + 1000) / (16 * GIB)))
    assert (tier.max_frames, tier.max_pixels_per_frame, tier.micro_batch) == (150, 224 * 224, 2)  # wanted[6]
    assert tier.estimate.device_bytes <= sixth + 1000
    short = choose_tier(job, TierLimits(memory=16 * GIB, longest=8))
    assert (short.max_frames, short.max_pixels_per_frame, short.micro_batch) == (8, 224 * 224, 8)
    with pytest.raises(NothingFits) as short:
        choose_tier(job, TierLimits(memory=16 * GIB, share=1e-5))
    assert short.value.needed > short.value.available


# ---- the file


@pytest.fixture
def writer(monkeypatch):
    """What writes the file."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("video_tiers")


def test_the_file_has_a_row_for_every_preset_method_and_covered_model(writer):
    singles = {name for name in list_presets() if get_preset(name).processes == 1} - {"cpu"}
    assert set(writer.covered_presets()) == singles and set(writer.COVERED_MODELS) <= set(bundled_video_models())
    keys = [(row["preset"], row["method"], row["model"]) for row in all_tiers()]
    known = {(name, method, model) for name in singles for method in METHODS for model in writer.COVERED_MODELS}
    assert len(keys) == len(set(keys)) and set(keys) == known


def test_every_row_fits_its_card_and_keeps_to_the_rule():
    for row in all_tiers():
        memory = get_preset(row["preset"]).hardware.memory
        assert row["capacity_bytes"] == memory
        if not row["max_frames"]:
            assert "refused" in row or row["needed_bytes"] > 0.9 * memory
            continue
        assert row["device_bytes"] <= 0.9 * memory
        assert row["per_device_train_batch_size"] * row["gradient_accumulation_steps"] == 32
        (_, frames), (_, micro) = guide_row(memory)
        assert row["max_frames"] <= frames and row["per_device_train_batch_size"] <= micro
        assert row["max_pixels_per_frame"] in (224**2, 336**2, 448**2)


def test_the_guides_tiers_hold_for_the_3b_model_with_qlora():
    for card, frames in (("rtx_3070", 75), ("rtx_4080", 150), ("rtx_4090", 200)):
        assert tiers_of(get_preset(card, "qlora"))["qwen2.5-vl-3b"]["max_frames"] == frames
    assert tiers_of(get_preset("rtx_3070", "qlora"))["qwen2.5-vl-7b"]["max_frames"] == 0


@pytest.mark.slow
def test_a_row_is_what_the_estimator_says(writer):
    preset = get_preset("rtx_3070", "qlora")
    assert writer.tier_row(preset, "qwen2.5-vl-3b") == tiers_of(preset)["qwen2.5-vl-3b"]


def test_show_prints_it(command):
    code, out, _ = command("show", "rtx_3070", "--method", "qlora")
    shown = " ".join(out.replace("│", " ").split())
    assert code == 0 and "video frames, qwen2.5-vl-3b" in shown and "75 of at most 224 × 224 pixels" in shown
    assert "nothing fits" in shown  # the 7B model
    told = json.loads(command("show", "rtx_3070", "--method", "qlora", "--json")[1])["video_tiers"]
    assert told["qwen2.5-vl-3b"]["max_frames"] == 75


# ---- the recipe


@pytest.fixture
def qwen(tmp_path):
    """Folders with the configuration of a bundled model alone, under a name that says nothing."""

    def make(name: str, **changes) -> str:
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        config = json.loads((architectures._FOLDER / f"{name}.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        return str(folder)

    return make


@pytest.fixture
def started(tmp_path, qwen, capsys):
    """The job of a command line, as far as it comes without weights; and its first line. The card is not here."""

    def start(*words: str, model: str = "qwen2.5-vl-3b", preset: str = "rtx_3070", method: str = "qlora"):
        argv = [
            *flags(
                preset=preset,
                method=method,
                use_cpu="true",
                model_name_or_path=qwen(model),
                dataset_name="videos.jsonl",
                output_dir=tmp_path / "out",
            ),
            *words,
        ]
        job = jobs.start(
            jobs.RecipeDefaults(arguments=video.VideoArguments, training={"remove_unused_columns": False}), argv
        )
        return job, next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  frames  "))

    return start


@pytest.fixture
def no_traces(monkeypatch):
    def refused(*_args, **_kwargs):
        raise AssertionError("the file answers this, without a trace")

    monkeypatch.setattr(video_tier, "choose_tier", refused)


def clips_of(job) -> tuple:
    args = job.args
    return (
        job.recipe.max_frames,
        job.recipe.max_pixels_per_frame,
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
    )


def test_the_recipe_takes_its_presets_row(started, no_traces):
    row = tiers_of(get_preset("rtx_3070", "qlora"))["qwen2.5-vl-3b"]
    job, line = started("--learning_rate", "1e-4", "--save_steps", "10")
    assert clips_of(job) == (75, 224 * 224, row["per_device_train_batch_size"], row["gradient_accumulation_steps"])
    assert job.args.activation_checkpointing
    assert "75 of at most 224 × 224 pixels, micro-batch 2 × 16: what is predicted to fit rtx_3070 with qlora" in line


def test_what_was_given_goes_over_the_row(started, no_traces):
    job, line = started("--max_frames", "40", "--effective_batch_size", "6")
    assert clips_of(job) == (40, 224 * 224, 2, 3) and "(max_frames as given)" in line
    job, line = started("--per_device_train_batch_size", "1", "--max_pixels_per_frame", "40000")
    assert (
        clips_of(job) == (75, 40000, 1, 32) and "(max_pixels_per_frame, per_device_train_batch_size as given)" in line
    )
    job, line = started("--max_frames", "500", "--max_pixels_per_frame", "90000", "--per_device_train_batch_size", "8")
    assert clips_of(job) == (500, 90000, 8, 4) and "all of it is given" in line
    job, line = started("--max_frames", "none")
    assert clips_of(job) == (None, None, 4, 8) and "max_frames none leaves no largest clip" in line


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["rtx_3070", "rtx_4090"])
def test_the_line_states_the_batch_that_runs(started, no_traces, preset):
    for words in (
        *(["--effective_batch_size", str(size)] for size in (1, 3, 5, 6, 32)),
        ["--gradient_accumulation_steps", "16"],
        ["--effective_batch_size", "6", "--video_profile", "maximum_savings"],
        ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "5"],
    ):
        job, line = started(*words, preset=preset)
        micro, accumulation = clips_of(job)[2:]
        assert f", micro-batch {micro} × {accumulation}" in line
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            assert (name in line) == (f"--{name}" in words)


def test_no_batch_is_stated_where_none_was_chosen(started, no_traces, monkeypatch):
    with pytest.raises(InputError, match="gradient_accumulation_steps=5 does not divide"):
        started("--gradient_accumulation_steps", "5")
    monkeypatch.setattr(video_tier, "world_size", lambda: 2)  # there is one process here
    _, line = started("--effective_batch_size", "4")
    assert "predicted for one device alone" in line and "micro-batch" not in line


def test_a_profile_goes_over_the_preset_and_under_what_was_given(started, no_traces):
    job, line = started("--video_profile", "maximum_savings", "--effective_batch_size", "16")
    assert clips_of(job) == (50, 224 * 224, 2, 8)
    assert "video_profile maximum_savings goes over preset rtx_3070" in line
    job, line = started(
        "--video_profile", "maximum_savings", "--max_frames", "30", "--gradient_accumulation_steps", "32"
    )
    assert clips_of(job)[:3] == (30, 224 * 224, 1) and "max_frames, gradient_accumulation_steps as given" in line
    job, _ = started("--video_profile", "maximum_performance", "--activation_checkpointing", "true")
    assert clips_of(job)[0] is None and job.args.activation_checkpointing and job.preset.dtype == "float32"


def test_a_profile_that_does_not_fit_stays_and_says_so(started, caplog):
    job, line = started("--video_profile", "balanced", model="qwen2.5-vl-7b", preset="rtx_3070", method="lora")
    assert clips_of(job) == (100, 224 * 224, 4, 8)
    assert "predicted not to fit rtx_3070" in line and "predicted not to fit" in caplog.text


@pytest.mark.slow
def test_nothing_fits(recipe, qwen, tmp_path, no_traces):
    """Before anything is loaded: there are no weights and no tokenizer here."""
    (tmp_path / "videos.jsonl").write_text("{}\n")
    data = tmp_path / "videos.jsonl"
    argv = [*flags(preset="rtx_3070", use_cpu="true", dataset_name=data, output_dir=tmp_path / "out")]
    with pytest.raises(InputError) as error:
        recipe("video_sft")([*argv, "--method", "qlora", "--model_name_or_path", qwen("qwen2.5-vl-7b")])
    message = str(error.value)
    assert "qwen2.5-vl-7b with method=qlora" in message and "90% of rtx_3070" in message
    assert "qwen2.5-vl-3b with method=qlora; rtx_3080" in message and not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="what fits: method=qlora"):
        recipe("video_sft")([*argv, "--model_name_or_path", qwen("qwen2.5-vl-3b")])


@pytest.mark.slow
def test_a_row_holds_for_its_own_settings_alone(started, monkeypatch):
    asked, jobs_asked = [], []

    def stopped(job, limits, note):
        asked.append((job.peft_config.r, limits.fixed, limits.effective_batch_size))
        jobs_asked.append(job)
        raise InputError("stopped here")

    monkeypatch.setattr(video_tier, "choose_tier", stopped)
    job, line = started("--lora.r", "64")
    assert asked == [(64, FixedLimits(), 32)] and "not predicted (stopped here)" in line
    assert clips_of(job) == (100, None, 4, 8)  # the balanced profile's
    started("--max_frames", "76")  # more than the row's
    started("--freeze_projector", "true")
    started("--activation_checkpointing", "false")
    assert len(asked) == 4 and asked[1][1] == FixedLimits(max_frames=76)
    started("--activation_checkpointing_kwargs", '{"every_n_layers": 4}')
    started("--per_device_eval_batch_size", "64")
    assert jobs_asked[-1].fields["per_device_eval_batch_size"] == 64
    started("--max_length", "1000")
    started("--max_video_tokens", "8")
    assert len(asked) == 8
    started("--max_length", "3000", "--max_frames", "40")  # which no sample reaches
    assert len(asked) == 8


# ---- other models, and plans


def test_a_resumed_plan_keeps_its_clips(started, monkeypatch, tmp_path, caplog):
    """The search and the plan are stood in for: other memory is free each time, and a trace takes long."""
    fits = iter((150, 75, 50))

    def choose(job, limits, note):
        return Tier(next(fits), 336**2, 1, SimpleNamespace(device_bytes=GIB))

    def plan(config, preset, *_, **settings):
        return auto.Planned(preset, MemoryArguments(), {"per_device_train_batch_size": 2}, "", None)

    monkeypatch.setattr(video_tier, "choose_tier", choose)
    monkeypatch.setattr(video_tier, "plan_here", plan)
    words = {"preset": "auto", "method": "lora"}
    assert clips_of(started("--dry_run", **words)[0])[:2] == (150, 336**2)

    assert not (tmp_path / "out").exists()

    def trained(*more) -> tuple:
        """What a run begins with; whether it says that it is another's."""
        job, line = started(*more, **words)
        video_tier.remember_clips(job)
        return *clips_of(job)[:2], "what the run that is resumed began with" in line

    assert trained() == (75, 336**2, False)
    assert trained() == (50, 336**2, False)  # nothing was saved: it begins anew
    checkpoint = tmp_path / "out" / "checkpoint-1"
    (checkpoint / "global_step1").mkdir(parents=True)
    TrainerState().save_to_json(str(checkpoint / "trainer_state.json"))
    assert trained() == (50, 336**2, True)
    assert trained("--max_frames", "40")[:2] == (40, 336**2)
    assert trained()[:2] == (40, 336**2)
    fits = iter((32, 16))
    assert trained("--resume_from_checkpoint", "no") == (32, 336**2, False)
    (tmp_path / "out" / video_tier.CLIPS_FILE).unlink()
    assert trained()[0] == 16 and "frames are chosen anew: pass --max_frames" in caplog.text


@pytest.fixture
def own_model(tmp_path):
    """A tiny model, its data and the arguments for a dry run."""
    folder = video_models.make("qwen2_5_vl", tmp_path / "tiny")
    videos.write(tmp_path / "clip.mp4", videos.numbered(12, 56, 56))
    row = {
        "messages": [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "red"}],
        "videos": ["clip.mp4"],
    }
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    return [
        *flags(
            model_name_or_path=folder, dataset_name=tmp_path / "rows.jsonl", held_out=0, output_dir=tmp_path / "out"
        )
    ]


@pytest.mark.slow
def test_a_model_that_no_row_knows_is_estimated(recipe, own_model, capsys):
    trainer = recipe("video_sft")([*own_model, "--preset", "cpu", "--dry_run"])
    limits = trainer.train_dataset.encode.limits
    (_, frames), (_, micro) = guide_row(get_preset("auto").hardware.memory)
    assert (limits.max_frames, trainer.args.per_device_train_batch_size) == (frames, micro)
    out = capsys.readouterr()
    assert f"frames  {frames} of " in out.out and "estimating 8 frames of 224 × 224" in out.err


@pytest.mark.slow
def test_auto_plans_for_what_is_free(recipe, own_model, monkeypatch, capsys):
    main, arguments = recipe("video_sft"), [*own_model, "--optim", "adamw_torch", "--max_frames", "12"]
    monkeypatch.setattr(auto, "usable_memory", lambda device: 2 * GIB)
    monkeypatch.setattr(video_tier, "usable_memory", lambda device: 2 * GIB)
    trainer = main([*arguments, "--max_steps", "1", "--effective_batch_size", "4", "--save_strategy", "no"])
    args = trainer.args
    assert args.per_device_train_batch_size == 4 and not args.activation_checkpointing  # everything fits
    assert trainer.train_dataset.encode.limits.max_frames == 12 and trainer.state.global_step == 1
    out = capsys.readouterr().out
    assert "max_frames as given" in out and "plan  balanced: micro-batch 4 × 1" in out
    kept = main(
        [
            *arguments,
            "--dry_run",
            *flags(per_device_train_batch_size=2, max_pixels_per_frame=3136, activation_checkpointing="true"),
        ]
    )
    assert (kept.args.per_device_train_batch_size, kept.args.gradient_accumulation_steps) == (2, 16)
    assert kept.args.activation_checkpointing

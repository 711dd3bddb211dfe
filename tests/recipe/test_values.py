"""What recipes decide and print, asked of their functions: each border, with stand-ins for jobs and trainers."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from hf_memopt.errors import InputError
from hf_memopt.estimator.result import Estimate
from hf_memopt.presets import get_preset
from hf_memopt.recipe import (
    answers,
    callbacks,
    phase_peaks,
    preference,
    preflight,
    prompts,
    rows,
    summary,
    video,
    video_tier,
)
from hf_memopt.recipe.argument_check import _pairs
from hf_memopt.recipe.auto import _pick_profile
from hf_memopt.recipe.defaults import RecipeDefaults, check_recipe, with_defaults
from hf_memopt.recipe.job import sequence_length
from hf_memopt.recipe.prediction import PeakBatch, _in_state
from hf_memopt.recipe.recipe_arguments import Parsed, RecipeArguments, _split_nested, _without_third
from hf_memopt.recipe.video_tier import _effective

TOKENS = {"input_ids": torch.zeros(3, 5, dtype=torch.long)}
MICRO, ACCUMULATION, EFFECTIVE = "per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size"


@pytest.fixture
def lines(monkeypatch):
    written = []
    monkeypatch.setattr(callbacks.tqdm, "write", written.append)
    return written


def at_step(step: int, first: bool = True, most: int = 8) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, max_steps=most, is_world_process_zero=first)


# ---- lines while it trains


def test_lines_of_a_run(lines):
    for most, steps in ((None, [1, 2, 3, 4, 5, 6, 7, 8]), (2, [1, 5, 8]), (4, [1, 3, 5, 7, 8]), (8, [*range(1, 9)])):
        lines.clear()
        logged = callbacks.TrainingLines(most)
        for step in range(1, 9):
            for logs, first in (({"loss": 1.0}, True), ({"loss": 1.0}, False), (None, True), ({"eval_loss": 1}, True)):
                logged.on_log(None, at_step(step, first), None, logs)
        assert [int(line.split()[1].split("/")[0]) for line in lines] == steps
    lines.clear()
    figures = {"tokens_per_second": 4321.6, "learning_rate": 2e-5, "rewards/accuracies": 0.755, "loss": 0.5, "x": 1}
    callbacks.TrainingLines().on_log(None, at_step(3), None, figures)
    callbacks.TrainingLines().on_log(None, at_step(3), None, {"loss": 1, "train_runtime": 61.6})
    assert lines == [
        "step 3/8: loss 0.5000, reward accuracy 0.76, learning rate 2e-05, 4,322 tokens/s",
        "trained 3 steps in 62 s",
    ]


def test_held_out_losses(lines):
    tokens, others = callbacks.HeldOutLoss(), callbacks.HeldOutLoss(perplexity=False)
    for loss, step in ((math.log(12), 4), (51.0, 5)):
        tokens.on_evaluate(None, at_step(step), None, {"eval_loss": loss})
    others.on_evaluate(None, at_step(6), None, {"eval_loss": 2.0})
    others.on_evaluate(None, at_step(7, first=False), None, {"eval_loss": 3.0})
    others.on_evaluate(None, at_step(8), None, {"eval_reward": 3.0})
    others.on_evaluate(None, at_step(9), None, None)
    assert (tokens.by_step, others.by_step) == ({4: math.log(12), 5: 51.0}, {6: 2.0, 7: 3.0})
    assert lines == [
        "step 4: held-out loss 2.4849 (perplexity 12.0)",
        f"step 5: held-out loss 51.0000 (perplexity {math.exp(50):.1f})",
        "step 6: held-out loss 2.0000",
    ]


def test_weights_without_a_gradient_are_named_once(caplog):
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(4)))
    model[0].weight.requires_grad_(False)
    model[0].bias.grad = torch.zeros(1)
    for step, plugin, said in ((1, None, 0), (0, object(), 0), (0, None, 1)):
        args = SimpleNamespace(deepspeed_plugin=plugin)
        callbacks.GradientCheck().on_pre_optimizer_step(args, at_step(step), None, model=model)
        assert len(caplog.messages) == said
    assert caplog.messages[0].startswith("6 trainable parameters got no gradient")
    assert caplog.messages[0].endswith("the first: 1.weight, 1.bias, 2.weight, 2.bias, 3.weight")


def test_rewards_of_the_first_and_the_last_steps(capsys):
    """Of tenths, one step at least."""
    job = SimpleNamespace(args=SimpleNamespace(process_index=0))
    for count, part in ((1, 1), (19, 1), (20, 2), (35, 3)):
        history = [{"step": 5 * n, "reward": 0, "rewards/sums/mean": float(n)} for n in range(count)]
        state = SimpleNamespace(log_history=[{"loss": 1}, *history])
        prompts.show_rewards(job, SimpleNamespace(state=state, reward_func_names=["sums"]))
        first, last = sum(range(part)) / part, sum(range(count - part, count)) / part
        steps = (5 * (part - 1), 5 * (count - 1))
        assert capsys.readouterr().out == (
            f"reward sums: {first:.3f} at step {steps[0]} → {last:.3f} at step {steps[1]}\n"
        )
    pairs = [{"step": n, "eval_rewards/accuracies": n / 8, "eval_rewards/margins": n / 2} for n in (0, 2, 4)]
    trainer = SimpleNamespace(state=SimpleNamespace(log_history=[{"loss": 1}, *pairs]))
    preference.show_rewards(job, trainer)
    assert "0.00 at step 0 → 0.50 at step 4 (chance is 0.50" in (said := capsys.readouterr().out)
    assert said.endswith("margin 0.000 → 2.000\n")
    job.args.process_index = 1
    for shown in (prompts.show_rewards, preference.show_rewards):
        shown(job, trainer)
    assert capsys.readouterr().out == ""


def test_rewards_of_completions():
    for text, right, reward in (
        (" 12.", "12", 1),
        ("4 + 8 = 12", "12", 1),
        ("1,234.50", "1234.5", 1),
        ("-3", "3", 0),
        ("so -3", "-3", 1),
        ("none", "none", 0),
        ("12", "none", 0),
        ("12 or 13", "12", 0),
    ):
        assert prompts.correct([text], [right]) == [reward], text
        assert prompts.correct([[{"content": "7"}, {"content": "8"}, {"content": text}]], [right]) == [reward], text
    assert prompts.numeric(["12", " 1a2b ", "", "  ", "abc", "7"]) == [1, 0.5, 0, 0, 0, 1]
    for row in prompts.sums(50):
        first, _, second, _ = row["prompt"].split()
        assert row["answer"] == str(int(first) + int(second)) and 0 <= int(first) < 10 > int(second) >= 0
    assert len({row["prompt"] for row in prompts.sums(50)}) > 30 and prompts.sums(9) == prompts.sums(50)[:9]


# ---- arguments and defaults


def test_groups_of_completions_divide_their_batch(monkeypatch):
    """(fields, what the user gave) -> the fields that are changed."""
    for fields, given, changed in (
        ({MICRO: 8, ACCUMULATION: 1}, (), {}),
        ({MICRO: 16, ACCUMULATION: 1}, (), {}),
        ({MICRO: 12, ACCUMULATION: 1}, (), {"num_generations": 6}),
        ({MICRO: 3, ACCUMULATION: 2}, (), {"num_generations": 6}),
        ({MICRO: 2, ACCUMULATION: 2}, (), {"num_generations": 4}),
        ({MICRO: 2, ACCUMULATION: 1}, (), {"num_generations": 2}),
        ({MICRO: 13, ACCUMULATION: 1}, (), {}),
        ({MICRO: 12, ACCUMULATION: 1, "num_generations": 8}, ("num_generations",), {}),
        ({MICRO: 3, ACCUMULATION: 2, "steps_per_generation": 8}, (), {}),
        ({MICRO: 3, ACCUMULATION: 2, "generation_batch_size": 16}, (), {}),
        ({MICRO: 3, ACCUMULATION: 2, "generation_batch_size": 10}, (), {"num_generations": 5}),
    ):
        job = SimpleNamespace(recipe=RecipeArguments(preset="cpu"), preset=get_preset("cpu"), given=set(given))
        training = {"output_dir": "out", "eval_strategy": "no", "num_generations": 8, **fields}
        assert prompts.RolloutArguments.prepare(job, training, None, False) == changed, fields
        training |= {"eval_strategy": "steps", "per_device_eval_batch_size": 6, "num_generations_eval": 4}
        evaluated = {"per_device_eval_batch_size": 4}
        assert prompts.RolloutArguments.prepare(job, training, None, False) == changed | evaluated, fields
        job.given.add("per_device_eval_batch_size")
        assert prompts.RolloutArguments.prepare(job, training, None, False) == changed, fields
    monkeypatch.setattr(prompts, "world_size", lambda: 2)  # of two processes, twice as many
    job.given, more = set(), {MICRO: 6, ACCUMULATION: 1, "per_device_eval_batch_size": 2}
    training = {"output_dir": "out", "eval_strategy": "steps", "num_generations": 8, **more}
    assert prompts.RolloutArguments.prepare(job, training, None, False) == {
        **{"num_generations": 6, "per_device_eval_batch_size": 6},
    }
    assert prompts.RolloutArguments.prepare(job, training | {"num_generations_eval": 4}, None, False) == {
        **{"num_generations": 6},
    }


def test_tokens_of_a_sample(caplog):
    """(max_length, the model's positions, the usual length) -> tokens; None where it is refused."""
    for (length, positions, usual), tokens in {
        **{(None, 512, 256): 256, (None, 512, 512): 512, (None, 512, 513): 512, (None, None, 4096): 4096},
        **{(2, 512, 99): 2, (1, 512, 99): None, (512, 512, 99): 512, (513, 512, 99): None, (9999, None, 99): 9999},
    }.items():
        job = SimpleNamespace(recipe=SimpleNamespace(max_length=length), model_name="a/b")
        job.preset, text = SimpleNamespace(seq_len=usual), SimpleNamespace(max_position_embeddings=positions)
        config = SimpleNamespace(get_text_config=lambda text=text: text)
        caplog.clear()
        if tokens is None:
            with pytest.raises(InputError, match=f"max_length={length} (must be at least 2|is more than the 512)"):
                sequence_length(job, config)
            continue
        assert sequence_length(job, config) == tokens and sequence_length(job, config, 7) == (length or 7)
        assert caplog.messages == ["max_length is 512, the model's positions (the preset has 513)"] * (usual == 513)


def parsed(training=None, given=(), **own) -> Parsed:
    return Parsed(RecipeArguments(**own), None, training or {}, {}, {}, frozenset(given))


def test_defaults_lie_under_what_is_given(caplog, tmp_path):
    defaults = RecipeDefaults(
        training={"learning_rate": 1e-3, "eval_steps": 5},
        adapters={"learning_rate": 1e-2},
        builtin={MICRO: 4, "max_length": 64, "weight_decay": 0.5},
        model=lambda: tmp_path,
        scratch=True,
    )
    recipe, training = with_defaults(parsed({"eval_steps": 7}, method="lora"), defaults, own_model=True)
    assert (recipe.model_name_or_path, training["learning_rate"], training["eval_steps"]) == (None, 1e-2, 7)
    assert (training["logging_steps"], training["save_total_limit"], training["eval_on_start"]) == (10, 2, True)
    assert training["num_train_epochs"] == 1 and "weight_decay" not in training and not caplog.messages
    recipe, training = with_defaults(parsed(given=("max_length",), max_length=9), defaults, own_model=False)
    assert (recipe.config_name, recipe.model_name_or_path, recipe.max_length) == (str(tmp_path), None, 9)
    assert (training["learning_rate"], training[MICRO], training["weight_decay"]) == (1e-3, 4, 0.5)
    assert training["eval_steps"] == 5 and not caplog.messages
    recipe, training = with_defaults(parsed(given=(EFFECTIVE,), method="lora"), defaults, own_model=False)
    assert (recipe.config_name, recipe.model_name_or_path, recipe.max_length) == (None, str(tmp_path), 64)
    assert MICRO not in training and training["weight_decay"] == 0.5 and "untrained" in caplog.text
    random = replace(defaults, scratch=False)
    assert with_defaults(parsed(), random, own_model=False)[0].model_name_or_path == str(tmp_path)


def test_arguments_that_contradict_each_other():
    for own, said in (
        ({"model_name_or_path": "a", "config_name": "b"}, "not both"),
        ({"config_name": "b", "method": "lora"}, "method=lora needs trained weights"),
        ({"held_out": -0.1}, "held_out=-0.1 must be 0"),
        ({"dtype": "float64"}, "dtype"),
        ({"profile": "bold"}, "profile"),
    ):
        with pytest.raises(InputError, match=said):
            check_recipe(RecipeArguments(**own), {})
    for own in ({"model_name_or_path": "a"}, {"config_name": "b"}, {"held_out": 0}, {"dtype": "float16"}):
        check_recipe(RecipeArguments(**own), {})


def test_words_of_a_command_line():
    assert list(_pairs(["--a", "1", "--no-b", "--c=2", "--d=", "-3", "--e", "-4", "x", "--f"])) == [
        *(("a", "1"), ("no_b", None), ("c", "2"), ("d", ""), ("e", "-4"), ("f", None)),
    ]
    rest, nested = _split_nested(["--lora.r", "8", "--x", "lora.y", "--quantization.a=true", "--lora.b=c=d"])
    assert rest == ["--x", "lora.y"] and nested == {"lora": {"r": 8, "b": "c=d"}, "quantization": {"a": True}}
    with pytest.raises(InputError, match=r"argument --lora\.r: a value is missing"):
        _split_nested(["--lora.r"])
    file = {MICRO: 8, ACCUMULATION: 4, EFFECTIVE: 32, "optim": "sgd"}
    for line, kept in (((), file), ((MICRO,), {EFFECTIVE}), ((EFFECTIVE,), {MICRO}), ((ACCUMULATION,), {EFFECTIVE})):
        left = _without_third(file, dict.fromkeys(line, 1))
        assert left.keys() - line == {*kept} | {"optim"}, line
    assert _without_third(file, {MICRO: 1, ACCUMULATION: 1}).keys() - {MICRO, ACCUMULATION} == {"optim"}


def test_the_samples_of_a_step_before_clips_are_chosen():
    job = SimpleNamespace(preset=SimpleNamespace(effective_batch_size=7))
    for training, samples in (
        ({}, 7),
        ({EFFECTIVE: 5}, 5),
        ({MICRO: 3}, 7),
        ({ACCUMULATION: 3, EFFECTIVE: 5}, 5),
        ({MICRO: 3, ACCUMULATION: 4, EFFECTIVE: 5}, 12),
    ):
        assert _effective(job, training) == samples, training


def test_when_a_row_of_the_file_holds(monkeypatch):
    """(what is another, what is given) -> frames, pixels and micro-batch; None where the job is estimated."""
    usual = {"max_frames": 50, "max_pixels_per_frame": 60_000, MICRO: 2, "capacity_bytes": 10_000, "device_bytes": 900}
    for (about, given), found in {
        ((), ()): (50, 60_000, 2),
        ((("capacity_bytes", 10_009),), ()): (50, 60_000, 2),
        ((("capacity_bytes", 10_011),), ()): None,
        ((("refused", "why"),), ()): None,
        ((), (("max_frames", 50),)): (50, 60_000, 2),
        ((), (("max_frames", 51),)): None,
        ((), (("max_frames", 8), ("micro_batch", 1))): (8, 60_000, 1),
        ((), (("max_pixels_per_frame", 60_001),)): None,
        ((), (("micro_batch", 3),)): None,
        ((("longest", 49 * 60_000),), ()): None,
        ((("longest", 50 * 60_000),), ()): (50, 60_000, 2),
        ((("max_frames", 0),), (("micro_batch", 1),)): None,
        ((("preset", "auto"),), ()): None,
        ((("bundled", None),), ()): None,
        ((("as_shipped", False),), ()): None,
        ((("row", "none"),), ()): None,
    }.items():
        own = {"preset": "rtx_3070", "bundled": "a model", "as_shipped": True, "longest": math.inf, "row": "one"}
        row = usual | dict(about)
        own |= {name: row.pop(name) for name in [*own] if name in row}
        hardware = SimpleNamespace(memory=10_000)
        preset = SimpleNamespace(hardware=hardware, name="rtx_3070", method="qlora")
        job = SimpleNamespace(recipe=SimpleNamespace(preset=own["preset"]), preset=preset)
        monkeypatch.setattr(
            video_tier, "tiers_of", lambda preset, row=row, own=own: {"a model": row} if own["row"] == "one" else {}
        )
        monkeypatch.setattr(video_tier, "_as_shipped", lambda job, parsed, own=own: own["as_shipped"])
        monkeypatch.setattr(video_tier, "_longest", lambda job, own=own: own["longest"])
        tier = SimpleNamespace(
            job=job, parsed=None, bundled=own["bundled"], fixed=video_tier.FixedLimits(**dict(given))
        )
        tier._tokens = lambda frames, pixels: frames * pixels
        chosen = video_tier._TierOfJob.of_the_file(tier)
        assert (chosen and (chosen.frames, chosen.pixels, chosen.micro_batch)) == found, (about, given)
    for limits, longest in (((None, None), math.inf), ((5, None), 5), ((None, 7), 7), ((5, 7), 5)):
        monkeypatch.undo()
        recipe = SimpleNamespace(max_length=limits[0], max_video_tokens=limits[1])
        assert video_tier._longest(SimpleNamespace(recipe=recipe)) == longest


def test_what_leaves_the_rows_of_the_file_as_they_are():
    for own, lora, training, given, holds in (
        ({}, {}, {}, (), True),
        ({"freeze_vision": False}, {}, {}, (), False),
        ({"freeze_projector": True}, {}, {}, (), False),
        ({"dtype": "float32"}, {}, {}, (), False),
        ({"attn_implementation": "sdpa"}, {}, {}, (), False),
        ({}, {"r": 4}, {}, (), False),
        ({}, {}, {"activation_checkpointing": False}, (), False),
        ({}, {}, {"learning_rate": 1, "save_steps": 5, "adam_beta1": 1}, ("learning_rate", "save_steps"), True),
        ({}, {}, {"optim": "sgd"}, ("optim",), False),
        ({}, {}, {"optim": "sgd"}, (), True),
        ({}, {}, {"activation_checkpointing_kwargs": {}}, ("activation_checkpointing_kwargs",), False),
    ):
        job = SimpleNamespace(recipe=video.VideoArguments(**own))
        memory = SimpleNamespace(levers=dict)
        asked = Parsed(job.recipe, memory, {"activation_checkpointing": True, **training}, lora, {}, frozenset(given))
        assert video_tier._as_shipped(job, asked) is holds, (own, lora, training, given)
    memory.levers = lambda: {"adam_mini": True}
    assert not video_tier._as_shipped(SimpleNamespace(recipe=video.VideoArguments()), asked)


def test_the_profile_and_the_next_safer_one():
    def profile(name, choice):
        more = {"preset": f"preset {name}", "memory_args": get_memory(), "summary": f"settings {choice}"}
        return SimpleNamespace(
            name=name,
            choice=SimpleNamespace(micro_batch=choice, accumulation=8 // choice),
            estimate=SimpleNamespace(device_bytes=2**30),
            **more,
        )

    def get_memory():
        from hf_memopt import MemoryArguments

        return MemoryArguments()

    profiles = [profile(name, size) for name, size in (("safe", 1), ("balanced", 2), ("maximum", 4))]
    profiles[1].choice = profiles[0].choice
    for name, preset, safer in (
        ("maximum", "maximum", "balanced"),
        ("balanced", "balanced", None),
        ("safe", "safe", None),
        ("aggressive", "safe", None),
    ):
        picked = _pick_profile(profiles, name, 4 * 2**30)
        assert (picked.preset, picked.safer) == (f"preset {preset}", safer)
        assert picked.memory_args.probe_worst_batch and picked.fields[MICRO] * picked.fields[ACCUMULATION] == 8
    assert _pick_profile(profiles, "maximum", 4 * 2**30).summary == "maximum: settings 4; 1.00 GiB of 4.00 GiB free"


def test_what_goes_with_packed_clips():
    def job(**memory):
        names = ("max_tokens_per_batch", "max_batch_size", "sparse_block_size", "sliding_window")
        memory_args = SimpleNamespace(**dict.fromkeys(names) | memory)
        return SimpleNamespace(recipe=SimpleNamespace(max_length=99, preset="cpu"), memory_args=memory_args)

    for training, micro in (({}, 1), ({MICRO: 3}, 3), ({"train_sampling_strategy": "random"}, 1)):
        video.prepare_packing(job(), training)
        assert training[MICRO] == micro
    for memory in ({"max_batch_size": 2}, {"sparse_block_size": 64}, {"sliding_window": 5}):
        with pytest.raises(InputError, match="do not go together"):
            video.prepare_packing(job(**memory), {})
    arguments = video.VideoArguments
    for vision, projector in ((True, False), (False, True), (True, True), (False, False)):
        frozen = arguments(freeze_vision=vision, freeze_projector=projector).frozen
        assert frozen == ("vision",) * vision + ("projector",) * projector
    assert arguments().frozen == ("vision",) and arguments.profile_of({})["max_frames"] == 100


# ---- rows


def test_rows_that_are_left_are_held_out(monkeypatch):
    """A held-out split of which no row is good is none, and nothing is evaluated."""
    asked, evaluated = {}, []

    def load_rows(source, keep, **settings):
        asked.update(settings)
        kept = keep([Dataset.from_dict({"text": ["a", "b"]}), Dataset.from_dict({"text": held_out})], "text")
        return *kept, "text"

    monkeypatch.setattr(rows, "load_rows", load_rows)
    monkeypatch.setattr(rows, "evaluate_nothing", evaluated.append)
    for held_out, given, kept in ((["c", None], ("held_out",), 1), ([None], (), None), (["c"], (), 1)):
        job = SimpleNamespace(recipe=RecipeArguments(skip_bad_rows=True), given=set(given), bad_rows=None)
        job.args = SimpleNamespace(seed=3)
        train, found, _ = rows.load_job_rows(job, "rows", rows._text_judge)
        assert len(train) == 2 and (found and len(found)) == kept and asked["adapt_held_out"] is (not given)
        assert job.bad_rows.count == held_out.count(None) and evaluated == [job.args] * (kept is None)
        evaluated.clear()
    with pytest.raises(InputError, match="has messages, and pretraining takes `text`"):
        rows._text_judge("rows", None, "messages")


def test_packed_samples_without_an_answer(caplog):
    for labels, left in (([[-100, 3], [-100, -100], [1, 2]], 2), ([[-100, 3]], 1), ([[-100, -100]], None)):
        job = SimpleNamespace(bad_rows=SimpleNamespace(counts={}), recipe=SimpleNamespace(dataset_name="x"))
        job.args, trainer = SimpleNamespace(max_length=2, packing=True), SimpleNamespace(eval_dataset=None)
        trainer.train_dataset = Dataset.from_dict({"labels": labels})
        caplog.clear()
        if left is None:
            with pytest.raises(InputError, match="no packed sample has an answer within 2 tokens"):
                answers.check_samples(job, trainer, 5)
            continue
        answers.check_samples(job, trainer, 5)
        assert len(trainer.train_dataset) == left and [*job.bad_rows.counts.values()] == [1] * (len(labels) > left)
        assert caplog.messages == ["1 of 3 packed samples dropped: no answer within max_length=2"] * (left == 2)


# ---- what was measured

ESTIMATE = Estimate(
    *(90, 100, 120, 0, "backward", {"optimizer_states": 30}),
    *({"forward": 70, "backward": 90, "optimizer": 80, "eval: x": 40}, None, {}, ()),
)


def test_an_estimate_in_the_state_of_a_batch():
    """(training, with states) -> the peak, its phase, and what is predicted of backward."""
    for (training, states), (peak, phase, backward) in {
        (True, True): (90, "backward", 90),
        (True, False): (80, "optimizer", 60),
        (False, True): (80, "optimizer", None),
        (False, False): (80, "optimizer", None),
    }.items():
        found = _in_state(ESTIMATE, PeakBatch(TOKENS, training, True, states))
        assert (found.peak_allocated_bytes, found.phase, found.phases.get("backward")) == (peak, phase, backward)
        assert (found.peak_reserved_bytes, found.device_bytes) == (10 + peak, 30 + peak)
    late = replace(ESTIMATE, phase="optimizer")
    assert _in_state(late, PeakBatch(TOKENS, with_states=False)).phases == ESTIMATE.phases
    small = replace(ESTIMATE, breakdown={"optimizer_states": 75})
    phases = _in_state(small, PeakBatch(TOKENS, with_states=False)).phases
    assert (phases["forward"], phases["backward"]) == (0, 15)
    assert PeakBatch(TOKENS).label == "3 × 5 tokens" and PeakBatch(TOKENS).shape == (3, 5)
    assert PeakBatch(TOKENS, False).label == "evaluation, 3 × 5 tokens"


def test_peaks_are_measured_where_storages_can_be_followed():
    model = torch.nn.Linear(3, 2)
    state = SimpleNamespace(global_step=4, max_steps=9)
    for device, processes, compiled, measured in (
        ("cpu", 1, False, True),
        ("cpu", 2, False, False),
        ("cpu", 1, True, False),
        ("meta", 1, False, False),
    ):
        args = SimpleNamespace(device=torch.device(device), world_size=processes, torch_compile=compiled)
        peaks = phase_peaks.PhasePeaks()
        peaks.on_train_begin(args, state, None, model=model)
        try:
            assert (peaks._ledger is not None) is measured and (peaks._hooks is None) is compiled
            assert peaks._last_step == (6 if measured else 0)
        finally:
            peaks.stop()
        assert peaks._ledger is peaks._hooks is None
    for last, step in ((5, 5), (7, 6)):
        peaks = phase_peaks.PhasePeaks()
        peaks.on_train_begin(
            SimpleNamespace(device=torch.device("cpu"), world_size=1, torch_compile=False),
            SimpleNamespace(global_step=4, max_steps=last),
            *(None, model),
        )
        peaks.stop()
        assert peaks._last_step == step


def test_the_batch_of_the_highest_peak(monkeypatch):
    """Kept where a peak is above all before it, and of phases of a batch alone."""
    weight = torch.nn.Parameter(torch.zeros(2))
    peaks, module = phase_peaks.PhasePeaks(), torch.nn.Module()
    module.weight, sizes = weight, {}
    peaks._on_forward(module, (), TOKENS)
    assert peaks._running is None, "nothing is measured"
    ended = []
    peaks._ledger = SimpleNamespace(peaks=sizes, begin=lambda *phase: None, __exit__=lambda *_: ended.append(1))

    def run(samples, training=True, gradient=None, states=True, **after):
        module.train(training)
        weight.grad, peaks._optimizer = gradient, SimpleNamespace(state=states)
        peaks._on_forward(module, (), {"input_ids": torch.zeros(samples, 5, dtype=torch.long)})
        sizes.update({name: SimpleNamespace(total=total) for name, total in after.items()})
        peaks._enter("between")
        return peaks.batch and (peaks.batch.shape[0], peaks.batch.training, *flags(peaks.batch))

    def flags(batch):
        return batch.with_gradients, batch.with_states

    assert run(1, optimizer=9) is None
    assert run(2, forward=1, states={}) == (2, True, False, False)
    assert run(3, backward=5, gradient=torch.ones(2)) == (3, True, True, True)
    assert run(4, backward=5) == (3, True, True, True)
    assert run(5, training=False, eval=6) == (5, False, False, True)
    assert run(6, optimizer=99) == (5, False, False, True)
    peaks._on_forward(module, (), {"input_ids": [1]})
    assert peaks._running is None
    peaks._last_step, sizes["save"] = 3, SimpleNamespace(total=150)
    peaks.on_step_end(None, SimpleNamespace(global_step=2), None)
    assert not peaks.bytes
    peaks.on_step_end(None, SimpleNamespace(global_step=3), None)
    assert (peaks.bytes, peaks.phases) == (150, {"forward": 1, "backward": 5, "optimizer": 99})


def test_peaks_of_a_card(monkeypatch):
    """The allocator's one peak is a phase's own where the phase raised it."""
    read = iter((5, 5, 8, 9, 9, 12, 20))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(read))
    peaks = phase_peaks.PhasePeaks()
    peaks._device, peaks._before = "cuda", 5
    seen = []
    peaks._running = PeakBatch(TOKENS)
    for phase in ("forward", "backward", "optimizer", "between", "forward", "between", "save"):
        peaks._enter(phase)
        seen.append(dict(peaks.phases))
    assert seen == [
        *({}, {}, {"backward": 8}, {"backward": 8, "optimizer": 9}, {"backward": 8, "optimizer": 9}),
        *[{"backward": 8, "optimizer": 9, "forward": 12}] * 2,
    ]
    assert peaks.batch == PeakBatch(TOKENS) and peaks._highest == 12


def test_words_at_the_end(tmp_path):
    folder = tmp_path / "a run"
    folder.mkdir()
    assert summary.what_next(f"{folder}/").startswith(f"transformers serve '{folder}/', and beside it")
    (folder / "adapter_config.json").touch()
    merged = f"'{folder}-merged'"
    serve = f"transformers serve {merged}, and beside it transformers chat {merged}; hf upload YOU/NAME {merged}"
    assert summary.what_next(f"{folder}/") == f"hf-memopt merge '{folder}/' {merged}; {serve}"
    for resume, checkpoint, words in (
        (None, None, ""),
        (None, "c", "; the same command continues"),
        ("true", "c", "; the same command continues"),
        (True, "c", "; the same command continues"),
        ("other/checkpoint-3", "c", "; the same command without resume_from_checkpoint continues"),
    ):
        job = SimpleNamespace(args=SimpleNamespace(resume_from_checkpoint=resume))
        assert summary._how_to_resume(job, checkpoint) == words
    events = [{"stage": "eval", "micro_batch_after": 9}, {"micro_batch_after": 4, "stage": "train"}, {"event": "x"}]
    assert summary._chunks(SimpleNamespace(memory_events=events)) == [4]
    assert [summary._rows(data) for data in (None, [0] * 1234, iter(()))] == ["none", "1,234 rows", "a stream"]
    weights = (SimpleNamespace(ds_numel=5), SimpleNamespace(quant_state=SimpleNamespace(shape=torch.Size([2, 3]))))
    assert [summary._count_parameters(one) for one in (*weights, torch.zeros(2, 2))] == [5, 6, 4]
    for points, length in ((599, 599), (600, 600), (1199, 1199), (1200, 600), (1201, 601)):
        assert len(summary._thinned([("a: b", 1)] * points)) == length
    assert summary._thinned([("a: b", 1), ("c", 3), ("d", 2), ("e", 0)], 2) == [("c", 3), ("d", 2)]


def test_root_may_lock_all_memory(monkeypatch):
    import resource

    for user, limit, lockable in ((0, 5, 2**62), (7, 5, 5), (7, resource.RLIM_INFINITY, 2**62)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        monkeypatch.setattr(preflight.os, "geteuid", lambda user=user: user)
        assert preflight._lockable() == lockable

"""Whole answers, looked at once and frozen: a figure or a word that changes unnoticed elsewhere is noticed here."""

import dataclasses
import hashlib
import itertools
import re

import frozen
import pytest
from faults import Strikes
from runs import ENDED, RECOVERED, reading, report, write_run
from small_runs import train

PHASES = ["load", "forward", "backward", "forward", "backward", "optimizer"]
SKIPPED = {**RECOVERED, "event": "oom_in_evaluation", "stage": "eval", "micro_batch_before": 4, "micro_batch_after": 2}


@pytest.fixture
def runs(tmp_path):
    """Folders of a run that recovered and of one that ended."""
    readings = [reading(0, "eval", speed=None), *(reading(step) for step in range(10, 50, 10)), reading(40, "save")]
    fuller = [reading(step, peak=18 + step / 20, speed=900.0 + step) for step in range(0, 100, 20)]
    more = {
        "global_step": 7,
        "events": [RECOVERED, SKIPPED],
        "method": "full",
        "predicted_timeline": [[p, 2**30] for p in PHASES],
    }
    first = write_run(tmp_path / "recovered", report(), readings)
    return first, write_run(tmp_path / "ended", report(**more), fuller, ended=ENDED)


@pytest.mark.parametrize("number", [0, 1], ids=["recovered", "ended"])
def test_the_page_of_a_run(number, runs):
    from hf_memopt.reports.next_steps import suggest_next_steps
    from hf_memopt.reports.run import read_run
    from hf_memopt.reports.run_report import run_page

    run = read_run(runs[number])
    page = bare(run_page(run), runs)
    frozen.check(f"page_{number}", {"page": page, "next": suggest_next_steps(run)})


def test_the_page_of_two_runs(runs):
    from hf_memopt.reports.run import read_run
    from hf_memopt.reports.run_report import compare_page

    frozen.check("page_of_two", bare(compare_page([read_run(run) for run in runs]), runs))


def bare(page: str, runs) -> list[str]:
    """A page's lines without its style, and without the folder of this test."""
    return re.sub(r"<style>.*?</style>", "", page.replace(str(runs[0].parent), ""), flags=re.DOTALL).splitlines()


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "at", "fields"),
    [
        ("backward", {"backward": {30}}, {}),
        ("everywhere", {"forward": {40, 300}, "backward": {200}, "optimizer": {5}}, {}),
        ("again and again", {"forward": {20, 40, 60, 80}}, {"gradient_accumulation_steps": 1}),
        ("evaluation", {"eval": {10, 30}}, {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}),
        ("one sample", {"backward": {100, 400}}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}),
    ],
)
def test_what_a_run_tells_of_its_failures(name, at, fields, tmp_path):
    strikes = Strikes(at)
    found = train(tmp_path, strikes, **fields)
    told = [{key: value for key, value in event.items() if not isinstance(value, float)} for event in found.events]
    seen = {"events": told, "hits": strikes.hits, "seen": found.seen, "step": found.step, "logs": len(found.logs)}
    frozen.check(f"run_{name.replace(' ', '_')}", seen)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("one_card", {"hardware": "rtx_4090", "method": "full"}),
        ("small_card", {"hardware": "t4", "method": "qlora"}),
        ("four_cards", {"hardware": "a100_80gbx4", "method": "full"}),
        ("unified", {"hardware": "apple_m2_16gb", "method": "lora"}),
    ],
)
def test_what_a_plan_knows_of_its_choices(name, asked):
    from transformers import LlamaConfig

    from hf_memopt.job.spec import JobSpec
    from hf_memopt.planner.choice_jobs import start_search
    from hf_memopt.planner.search import summarize
    from hf_memopt.planner.settle import settle

    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=512, vocab_size=1000)
    spec = JobSpec(model=config, config=config, seq_len=256, effective_batch_size=16, **asked)
    search = start_search(settle(spec, asked["method"]), lambda text: None)
    frozen.check(
        f"choices_{name}",
        {
            f"{choice.strategy}: {summarize(choice)}": [
                int(search.needs(choice)),
                search.host_bytes(choice),
                frozen.figures(search.seconds[choice]),
            ]
            for choice in search.choices
        },
    )


def test_every_preset():
    from hf_memopt.presets import METHODS, get_preset, list_presets

    def told(preset) -> dict:
        kept = (
            *("micro_batch_size", "gradient_accumulation_steps", "seq_len", "processes", "strategy", "dtype"),
            "precision",
        )
        return {**{name: getattr(preset, name) for name in kept}, "training": dict(preset.training)}

    found = {
        f"{name} {method}": told(get_preset(name, method))
        for name, method in itertools.product(list_presets(), METHODS)
    }
    frozen.check("presets", found)


def test_which_feature_goes_with_what():
    """Every memory feature alone, with each engine and method: why not, or nothing."""
    from hf_memopt import MemoryArguments
    from hf_memopt.engines import engine_named
    from hf_memopt.errors import InputError
    from hf_memopt.levers.arguments import FEATURES
    from hf_memopt.levers.facts import Facts
    from hf_memopt.levers.feature import Feature

    asked = {
        "loss_chunk_size": 512, "mlp_tile_size": 1024, "activation_offload": True, "activation_compression": "int8",
        "weight_streaming": True, "optimizer_cpu_offload": True, "optimizer_in_backward": True, "adam_mini": True,
        "sliding_window": 256, "sparse_block_size": 64, "logits_to_keep": True, "checkpoint_ratio": 0.5,
        "max_tokens_per_batch": 4096, "quantized_experts": True, "compile_memory_budget": 0.5,
    }  # fmt: skip
    refusing = [feature for feature in FEATURES if feature.refused is not Feature.refused]
    without = [
        feature for feature in refusing if asked.keys().isdisjoint(item.name for item in dataclasses.fields(feature))
    ]
    assert not without, "each feature that refuses has a value above"
    settings = {"plain": {}, "checkpointed": {"activation_checkpointing": True}, "compiled": {"torch_compile": True},
                "accumulating": {"gradient_accumulation_steps": 2}, "8 bits": {"optim": "adamw_8bit"}}  # fmt: skip
    found = {}
    for (name, value), strategy, (label, fields) in itertools.product(
        asked.items(), ("none", "ddp", "zero3", "fsdp2", "tp2"), settings.items()
    ):
        try:
            facts = Facts.of_settings(MemoryArguments(**{name: value}), fields, engine_named(strategy), "cuda")
            found[f"{name}, {strategy}, {label}"] = [str(refusal) for refusal in facts.feature_refusals()]
        except InputError as error:
            found[f"{name}, {strategy}, {label}"] = f"error: {error}"
    frozen.check("features", found)


def test_what_a_monitor_recommends():
    from test_monitor import reading as device_reading

    from hf_memopt import MemoryMonitor

    found = {}
    for kind, status, size, fields in itertools.product(
        ("cuda", "cpu", "mps"),
        ("warning", "critical", "emergency"),
        (None, 1, 8),
        (
            {"reserved": 23, "peak_allocated": 15, "used": 23.9},
            {"used": 23},
            {"peak_allocated": 20.5},
            {"reserved": 18.4},
        ),
    ):
        monitor = MemoryMonitor(device="cpu")
        monitor.reader.kind = kind
        told = monitor._recommendations(status, device_reading(18, **fields), size)
        found[f"{kind}, {status}, {size}, {fields}"] = told
    frozen.check("monitor", found)


@pytest.mark.parametrize("kind", ["leak", "fragmentation", "longer data", "other process", None])
def test_when_growth_is_said(kind):
    from test_monitor import scenario

    found = {}
    for steps in range(4, 64, 4):
        diagnosis = scenario(kind, steps)
        found[steps] = diagnosis.label()
    frozen.check(f"growth_{kind or 'none'}".replace(" ", "_"), found)


@pytest.mark.parametrize("owners", [True, False])
def test_what_a_snapshot_tells(owners, tmp_path, command):
    from contrib.test_snapshot import _pickled, cuda_snapshot

    about = {
        "reason": "step 2",
        "device": "cuda:0",
        "capacity": 8000,
        "marks": [(1, "step", "2"), (2, "phase", "forward"), (15, "phase", "backward"), (35, "phase", "optimizer")],
        "owners": [[1, 1000, 1000, "parameters", "a.weight"], [34, 3000, 200, "gradients", "a.weight"]],
    }
    path = _pickled(tmp_path, cuda_snapshot(**({"hf_memopt": about} if owners else {})))
    told = [command("snapshot", path, *more)[:2] for more in ((), ("--json",))]
    frozen.check(f"snapshot_{owners}", [[code, out.replace(str(tmp_path), "").splitlines()] for code, out in told])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", "llava_onevision"])
def test_what_a_video_becomes(family, tmp_path):
    import torch
    import video_models
    import videos
    from transformers import AutoConfig

    from hf_memopt.video.encoder import Encoder
    from hf_memopt.video.media import Limits
    from hf_memopt.video.processor import load_processor

    for frames in (5, 40):
        videos.write(tmp_path / f"{frames}.mp4", videos.numbered(frames, 60, 80), rate=25)
    model = video_models.make(family, tmp_path / "model")
    question = {"role": "user", "content": "<video>Before.<video>What is moving?"}
    rows = [
        {
            "messages": [question, {"role": "assistant", "content": "first red then blue"}],
            "videos": ["5.mp4", "40.mp4"],
        },
        {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]},
    ]
    found = {}
    for name, limits in {
        "few": {"max_frames": 4},
        "small": {"max_frames": 16, "max_pixels_per_frame": 32 * 32},
    }.items():
        encoder = Encoder(load_processor(str(model), AutoConfig.from_pretrained(model)), Limits(**limits), tmp_path)
        for number, row in enumerate(rows):
            sample = encoder(row)
            found[f"{name} {number}"] = {
                key: shown(value) for key, value in sample.items() if isinstance(value, torch.Tensor)
            }
    frozen.check(f"video_{family}", found)


def shown(value) -> str:
    """Numbers that are whole, or their digest where they are many; of others the shape."""
    text = str(list(value.shape) if value.is_floating_point() else value.tolist())
    return text if len(text) < 3000 else hashlib.sha256(text.encode()).hexdigest()

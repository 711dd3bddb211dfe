"""Readers, thresholds, the callback and the diagnosis of growth, on this machine's real memory."""

import logging
import mmap
import random

import psutil
import pytest
import torch
from small_runs import train
from transformers import TrainerCallback, TrainingArguments

from hf_memopt import InputError, MemoryMonitor
from hf_memopt.hardware.detection import host_memory
from hf_memopt.monitor.growth import GrowthDiagnosis, Observation
from hf_memopt.monitor.readers import Reader, Reading, peak_resident

GIB = 2**30


def reading(allocated: float, capacity: float = 24, **more) -> Reading:
    fields = {"reserved": allocated, "peak_allocated": allocated, "peak_reserved": allocated, "used": allocated}
    sizes = {
        name: int(size * GIB)
        for name, size in ({"allocated": allocated, "capacity": capacity} | fields | more).items()
    }
    return Reading(**sizes, retries=0, host_resident=GIB, host_available=8 * GIB)


def _new_memory(size: int) -> torch.Tensor:
    """A tensor on pages of its own: malloc may give out what this process has freed before, and nothing grows."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(1)


def test_the_cpu_reader_reads_this_process():
    found = Reader("cpu").read()
    assert found.allocated == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    before = found.allocated
    held = _new_memory(64 * 2**20)
    assert Reader("cpu").allocated() - before > 60 * 2**20
    assert peak_resident() >= Reader("cpu").allocated() * 0.98
    assert 0 < found.capacity <= psutil.virtual_memory().total
    assert Reader("cpu", limit=GIB).read().capacity == GIB
    del held


def test_a_container_has_less(monkeypatch, tmp_path):
    from hf_memopt.hardware import detection

    (tmp_path / "memory.max").write_text("1073741824\n")
    monkeypatch.setattr(detection, "_CGROUP_LIMITS", (str(tmp_path / "memory.max"),))
    assert host_memory() == GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory() == psutil.virtual_memory().total


class FakeDevice:
    """Stands for torch.cuda, which is not here: figures as memory_stats and mem_get_info give them."""

    def __init__(self, integrated: bool = False):
        self.integrated = integrated

    def memory_allocated(self, device):
        return 10 * GIB

    def memory_stats(self, device):
        sizes = {"allocated": (10, 14), "reserved": (18, 20)}
        found = {f"{name}_bytes.all.current": now * GIB for name, (now, _) in sizes.items()}
        return (
            found
            | {f"{name}_bytes.all.peak": peak * GIB for name, (_, peak) in sizes.items()}
            | {"num_alloc_retries": 3}
        )

    def mem_get_info(self, device):
        return 2 * GIB, 24 * GIB

    def get_device_properties(self, device):
        return type("Properties", (), {"is_integrated": self.integrated})


def on_cuda(integrated: bool = False) -> Reader:
    reader = Reader("cpu")
    reader.kind, reader._module = "cuda", FakeDevice(integrated)
    return reader


def test_cuda_figures_are_put_together():
    found = on_cuda().read()
    assert (found.allocated, found.peak_reserved, found.retries) == (10 * GIB, 20 * GIB, 3)
    assert (found.used, found.free, found.capacity) == (22 * GIB, 2 * GIB, 24 * GIB)
    assert found.fragmentation == pytest.approx(0.3)


def test_unified_memory_counts_the_host():
    available = psutil.virtual_memory().available
    expected = min(24 * GIB, 22 * GIB + available)
    assert on_cuda(integrated=True).read().capacity == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("profile", "shares"),
    [
        ("aggressive", (0.92, 0.94, 0.96, 0.98)),
        ("balanced", (0.90, 0.92, 0.95, 0.97)),
        ("conservative", (0.85, 0.88, 0.92, 0.95)),
    ],
)
def test_profiles(profile, shares):
    monitor = MemoryMonitor(profile=profile)
    found = (
        monitor.target_utilization,
        monitor.warning_threshold,
        monitor.critical_threshold,
        monitor.emergency_threshold,
    )
    assert found == shares
    names = [monitor.status(share) for share in (0.5, shares[1], shares[2], shares[3], 1.2)]
    assert names == ["normal", "warning", "critical", "emergency", "emergency"]


def test_thresholds_by_keyword_and_refused():
    monitor = MemoryMonitor(
        target_utilization=0.5, warning_threshold=0.6, critical_threshold=0.7, emergency_threshold=0.8
    )
    assert monitor.status(0.75) == "critical"
    with pytest.raises(InputError, match="must rise"):
        MemoryMonitor(warning_threshold=0.99)
    with pytest.raises(InputError, match="Did you mean 'conservative'"):
        MemoryMonitor(profile="conservativ")


def test_health_and_breakdown():
    monitor = MemoryMonitor(device="cpu", limit=10 * Reader("cpu").allocated())
    health = monitor.check_memory_health(batch_size=8)
    assert health["status"] == "normal" and health["recommendations"] == []
    assert 0.05 < health["gpu_utilization"] == health["utilization"] < 0.2
    full = MemoryMonitor(device="cpu", limit=Reader("cpu").allocated()).check_memory_health(batch_size=8)
    assert full["status"] == "emergency"
    assert "per_device_train_batch_size=4" in full["recommendations"][0]
    found = monitor.get_detailed_memory_breakdown()
    assert found["total"]["allocated_gb"] == found["total"]["allocated_bytes"] / 1e9
    assert 0 <= found["fragmentation"]["ratio"] < 1
    assert found["host"]["available_bytes"] > 0


def test_recommendations_name_fragments_and_other_processes():
    monitor = MemoryMonitor(device="cpu")
    monitor.reader.kind = "cuda"
    shown = " ".join(monitor._recommendations("critical", reading(20, reserved=23, peak_allocated=15, used=23.9), 1))
    assert "expandable_segments" in shown
    shown = " ".join(monitor._recommendations("warning", reading(18, used=23), 4))
    assert "another process holds 5.0 GiB" in shown


@pytest.mark.slow
def test_activation_memory_comes_from_the_estimator():
    monitor = MemoryMonitor(device="cpu")
    sizes = {"batch_size": 12, "sequence_length": 256, "hidden_size": 512, "num_layers": 14, "num_attention_heads": 8}
    plain = monitor.estimate_activation_memory(**sizes)
    less = monitor.estimate_activation_memory(**sizes, use_gradient_checkpointing=True)
    assert less["effective_memory_bytes"] < plain["effective_memory_bytes"] == less["without_checkpointing_bytes"]
    assert less["savings_gb"] * 1e9 == pytest.approx(plain["effective_memory_bytes"] - less["effective_memory_bytes"])
    # Of each layer at least four tensors as wide as the model are kept, in bf16.
    assert plain["effective_memory_bytes"] > 14 * 4 * 12 * 256 * 512 * 2


@pytest.mark.slow
def test_activation_memory_is_the_estimators():
    """The same question to estimate(), as docs/memory.md asks it."""
    from transformers import LlamaConfig

    from hf_memopt import estimate
    from hf_memopt.monitor.optimizations import CHECKPOINTING

    sizes = {"batch_size": 2, "sequence_length": 512, "hidden_size": 128, "num_layers": 6, "num_attention_heads": 4}
    answer = MemoryMonitor(device="cpu").estimate_activation_memory(**sizes, use_gradient_checkpointing=True)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, vocab_size=32_000
    )
    fields = {"per_device_train_batch_size": 2, "bf16": True}
    assert answer["without_checkpointing_bytes"] == estimate(config, fields, 512, "a100_80gb").breakdown["activations"]
    checkpointed = estimate(config, {**fields, **CHECKPOINTING}, 512, "a100_80gb")
    assert answer["effective_memory_bytes"] == checkpointed.breakdown["activations"]


GUIDE = {
    "model": {"use_flash_attention": True, "deepspeed_activation_checkpointing": True},
    "training": {
        "deepspeed": {"use_deepspeed": True, "zero_stage": 1, "cpu_offload": False},
        "fp16": True,
        "mixed_precision": "fp16",
        "bf16": False,
        "batch_size": 12,
        "memory": {"target_utilization": 0.9},
    },
    "output": {"gradient_checkpointing": True},
    "data": {"prefetch_factor": 2},
}
ALL = {"activation_checkpointing", "flash_attention", "mixed_precision", "8bit_optimizer", "zero", "cpu_offload"}


@pytest.mark.parametrize(
    ("config", "enabled"),
    [
        (GUIDE, {"activation_checkpointing", "flash_attention", "mixed_precision", "zero"}),
        (
            {
                "model": {"use_flash_attention": False},
                "training": {"deepspeed": {"zero_stage": 3, "cpu_offload": True}},
            },
            {"zero", "cpu_offload"},
        ),
        (
            {"training": {"deepspeed": {"use_deepspeed": False, "zero_stage": 1}, "optimizer": "adamw_8bit"}},
            {"flash_attention", "8bit_optimizer"},
        ),
        (
            {"bf16": True, "attn_implementation": "eager", "optim": "adamw_8bit", "activation_checkpointing": True},
            {"activation_checkpointing", "mixed_precision", "8bit_optimizer"},
        ),
        (
            {
                "bf16": {"enabled": True},
                "attn_implementation": "flash_attention_2",
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            },
            {"flash_attention", "mixed_precision", "zero", "cpu_offload"},
        ),
        ({"deepspeed": "zero3_offload_cpu"}, {"flash_attention", "zero", "cpu_offload"}),
        ({"deepspeed": {"zero_optimization": {"stage": 0}}}, {"flash_attention"}),
        ({"fsdp": True, "fsdp_config": {"version": 2}}, {"flash_attention", "zero"}),
    ],
)
def test_optimizations_of_any_configuration(config, enabled):
    found = MemoryMonitor(device="cpu").track_memory_optimizations(config)
    assert found.keys() == ALL
    assert {name for name, about in found.items() if about["enabled"]} == enabled


@pytest.mark.parametrize(
    ("config", "message"),
    [({"mixed_precision": "fp17"}, "mixed_precision.*'fp17'"), ({"training": {"zero_stage": 4}}, "zero_stage.*'4'")],
)
def test_optimizations_that_do_not_exist(config, message):
    with pytest.raises(InputError, match=message):
        MemoryMonitor(device="cpu").track_memory_optimizations(config)


@pytest.mark.slow
def test_what_optimizations_save_is_predicted(tmp_path):
    from transformers import LlamaConfig

    args = TrainingArguments(str(tmp_path), use_cpu=True, bf16=True, optim="adamw_torch_fused")
    monitor = MemoryMonitor(device="cpu")
    found = monitor.track_memory_optimizations(args)
    assert found["mixed_precision"] == {
        "enabled": True,
        "memory_savings": None,
        "not_predicted": "needs a model: pass model=…",
    }
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, vocab_size=8000
    )
    found = monitor.track_memory_optimizations(args, config, seq_len=256, hardware="rtx_3060")
    assert not found["activation_checkpointing"]["enabled"]
    assert found["activation_checkpointing"]["memory_savings"] > 0 and found["flash_attention"]["memory_savings"] > 0
    # Of four cards: optimizer states of 8 bytes a weight, spread or in host memory.
    guide = {**GUIDE, "training": GUIDE["training"] | {"mixed_precision": "bf16", "fp16": False, "batch_size": 1}}
    found = monitor.track_memory_optimizations(guide, config, 256, "a100_80gb", world_size=4)
    assert all(found[name]["memory_savings"] is not None for name in ("zero", "cpu_offload")), found
    assert found["zero"]["memory_savings"] > 0


def test_the_dashboard_line():
    monitor = MemoryMonitor(device="cpu", silent_mode=False)
    assert monitor.dashboard(100, reading(18.5)) == "[Step 100] Memory: 18.5/24.0 GiB (77%), Status: normal"
    assert "(95%), Status: critical - reducing" in monitor.dashboard(300, reading(22.9), "reducing")
    quiet = MemoryMonitor(device="cpu")
    assert quiet.dashboard(1, reading(18.5)) is None
    assert "critical" in quiet.dashboard(2, reading(22.9))
    assert quiet.dashboard(3, reading(22.9)) is None
    assert "normal" in quiet.dashboard(4, reading(10))


# ---- growth


def scenario(kind: str | None, steps: int = 60) -> GrowthDiagnosis:
    noise = random.Random(1)
    found = GrowthDiagnosis(24 * GIB)
    for step in range(steps):
        elements = noise.randrange(4000, 8000) * (1 + (2 * step / steps if kind == "longer data" else 0))
        resting = 8 * GIB + noise.randrange(2**20)
        peak = resting + int(elements * 400_000)
        reserved = int(1.05 * (8 * GIB + 8000 * 400_000))
        if kind == "leak":
            resting, peak = resting + step * 40 * 2**20, peak + step * 40 * 2**20
        if kind == "fragmentation":
            reserved += step * 60 * 2**20
        others = step * 50 * 2**20 if kind == "other process" else 0
        found.observe(Observation(resting, peak, max(reserved, peak), int(elements), others))
    return found


@pytest.mark.parametrize("kind", ["leak", "fragmentation", "longer data", "other process", None])
def test_causes_of_growth_are_distinguished(kind):
    assert scenario(kind).label() == kind


@pytest.mark.slow
def test_growth_is_said_with_what_to_do(tmp_path, caplog, capsys):
    """A real leak: a callback that keeps 40 MB a step, of a limit of 1 GB more than there is."""
    kept = []
    torch.ones(2 * GIB, dtype=torch.uint8)  # a peak before training, which is no alarm

    class Leak(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            kept.append(_new_memory(40 * 2**20))

    def prepare(trainer):
        trainer._callback.monitor = MemoryMonitor(device="cpu", limit=Reader("cpu").allocated() + GIB)
        trainer.add_callback(Leak())

    with caplog.at_level(logging.WARNING):
        train(tmp_path, prepare=prepare, max_steps=20, logging_strategy="steps", logging_steps=1)
    assert "memory grows: leak" in caplog.text and "emptying the allocator's cache does not help" in caplog.text
    assert "emergency" not in capsys.readouterr().out

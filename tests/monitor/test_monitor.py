"""Readers, thresholds, the callback and the diagnosis of growth, on this machine's real memory."""

import logging
import mmap
import random
import re
from types import SimpleNamespace

import psutil
import pytest
import torch
from small_runs import train
from transformers import TrainerCallback, TrainingArguments

from hf_memopt import InputError, MemoryMonitor
from hf_memopt.hardware.detection import host_memory
from hf_memopt.monitor.growth import GrowthDiagnosis, Observation
from hf_memopt.monitor.optimizations import OPTIMIZATIONS, Settings, predict_savings, read_settings
from hf_memopt.monitor.readers import Reader, Reading, peak_resident, process_limited

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
    assert reading(8, peak_reserved=0).fragmentation == 0 and reading(6).utilization == 0.25
    assert reading(8, used=30).free == 0 and reading(8, used=20).to_dict()["free"] == 4 * GIB
    limited = on_cuda()
    limited.limit = 5 * GIB
    assert limited.capacity() == 5 * GIB and limited.allocated() == 10 * GIB


def test_metal_reports_no_peaks():
    reader = Reader("cpu")
    sizes = {"current_allocated_memory": 3, "driver_allocated_memory": 5, "recommended_max_memory": 11}
    reader.kind, reader._module = (
        "mps",
        SimpleNamespace(**{name: lambda size=size: size for name, size in sizes.items()}),
    )
    found = reader.read()
    assert (found.allocated, found.peak_allocated, reader.allocated(), reader.busy()) == (3, 3, 3, None)
    assert (found.reserved, found.peak_reserved, found.used, found.capacity, found.retries) == (5, 5, 5, 11, 0)


def test_a_process_is_limited_where_its_allocator_can_be(monkeypatch, subtests):
    """The share of a device of 10 GiB, which is put back; Metal's may be twice what it recommends."""
    for kind, before, shares in (("xpu", 0.25, {5: 0.5, 40: 1.0}), ("mps", 1.7, {5: 0.5, 40: 2.0})):
        for gib, share in shares.items():
            with subtests.test(kind, gib=gib):
                asked = []
                module = SimpleNamespace(
                    get_per_process_memory_fraction=lambda device: 0.25,
                    get_device_properties=lambda device: SimpleNamespace(total_memory=10 * GIB),
                    recommended_max_memory=lambda: 10 * GIB,
                    set_per_process_memory_fraction=lambda share, device=None, asked=asked: asked.append(share),
                )
                monkeypatch.setattr(torch, kind, module)
                with process_limited(SimpleNamespace(type=kind), gib) as is_limited:
                    assert is_limited and asked == [share]
                assert asked == [share, before]
    for kind, gib in (("cpu", 5), ("xpu", None)):
        with process_limited(SimpleNamespace(type=kind), gib) as is_limited:
            assert not is_limited


def test_unified_memory_counts_the_host():
    """24 GiB of which 22 are used, also by what the host holds beside this process."""
    for available, capacity in ((GIB, 23 * GIB), (2 * GIB, 24 * GIB), (3 * GIB, 24 * GIB)):
        assert on_cuda(integrated=True)._read_cuda({"host_available": available})["capacity"] == capacity


PROFILES = {
    "aggressive": (0.92, 0.94, 0.96, 0.98),
    "balanced": (0.90, 0.92, 0.95, 0.97),
    "conservative": (0.85, 0.88, 0.92, 0.95),
    None: (0.5, 0.6, 0.7, 0.8),
}


def test_profiles_and_thresholds(subtests):
    names = ("target_utilization", "warning_threshold", "critical_threshold", "emergency_threshold")
    for profile, shares in PROFILES.items():
        with subtests.test(profile):
            own = {} if profile else dict(zip(names, shares, strict=True))
            monitor = MemoryMonitor(profile=profile or "balanced", **own)
            assert tuple(getattr(monitor, name) for name in names) == shares
            begins = {monitor.status(share): monitor.status(share - 1e-9) for share in shares[1:]}
            assert begins == {"warning": "normal", "critical": "warning", "emergency": "critical"}
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


ADVICE = {
    "another process": [("warning", 18, {"used": 18 + 2.5}), ("normal", 18, {"used": 23})],
    "expandable_segments": [
        ("critical", 20, {"reserved": 13.25, "peak_allocated": 10}),
        ("warning", 1, {"reserved": 2}),
    ],
    "longer samples": [("warning", 18, {})],
    "activation_checkpointing": [("critical", 18, {}), ("emergency", 18, {})],
    "per_device_train_batch_size=2 ": [("critical", 18, {}), ("emergency", 18, {})],
}
NO_ADVICE = {
    "another process": [("warning", 18, {"used": 18 + 2.4}), ("normal", 18, {"used": 20, "reserved": 19})],
    "expandable_segments": [("critical", 20, {"reserved": 13, "peak_allocated": 10}), ("normal", 1, {"reserved": 2})],
    "longer samples": [("critical", 18, {}), ("normal", 18, {})],
    "activation_checkpointing": [("warning", 18, {}), ("normal", 18, {})],
    "per_device_train_batch_size": [("warning", 18, {}), ("normal", 18, {})],
}


def test_what_is_recommended(subtests):
    monitor = MemoryMonitor(device="cpu")
    for cases, wanted in ((ADVICE, True), (NO_ADVICE, False)):
        for text, situations in cases.items():
            for status, allocated, more in situations:
                with subtests.test(text, status=status, **more):
                    monitor.reader.kind = "cuda"
                    given = monitor._recommendations(status, reading(allocated, **more), 5)
                    assert (text in " ".join(given)) is wanted
                    monitor.reader.kind = "cpu"  # whose processes share their memory with all others
                    given = " ".join(monitor._recommendations(status, reading(allocated, **more), 1))
                    assert not re.search("another process|expandable_segments|per_device_train_batch_size", given)
    assert "per_device_train_batch_size=1 " in monitor._recommendations("critical", reading(20), 2)[0]


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


CONFIGURATIONS = (
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
    ({"fp16": True, "zero_stage": 0}, {"flash_attention", "mixed_precision"}),
    ({"use_flash_attention": False, "attn_implementation": "sdpa"}, {"flash_attention"}),
    ({"zero_stage": 1}, {"flash_attention", "zero"}),
)


def test_optimizations_of_any_configuration(subtests):
    for config, enabled in CONFIGURATIONS:
        with subtests.test(config=config):
            found = MemoryMonitor(device="cpu").track_memory_optimizations(config)
            assert found.keys() == ALL
            assert {name for name, about in found.items() if about["enabled"]} == enabled
    for config, message in (
        ({"mixed_precision": "fp17"}, "mixed_precision.*'fp17'"),
        ({"training": {"zero_stage": 4}}, "zero_stage.*'4'"),
    ):
        with pytest.raises(InputError, match=message):
            MemoryMonitor(device="cpu").track_memory_optimizations(config)


def test_settings_of_any_configuration():
    """Only the first of two precisions, sections that are one value, and what a switch leaves."""
    assert read_settings({"mixed_precision": "fp16", "fp16": True, "bf16": True, "optim": "sgd"}).fields == {
        **{"optim": "sgd", "bf16": True}
    }
    assert read_settings({"optimizer": {"type": "AdamW"}, "batch_size": "4", "training": {"micro_batch_size": 3}}) == (
        Settings({"per_device_train_batch_size": 3})
    )
    for config, stage, offloads in (
        ({"cpu_offload": True}, 2, True),
        ({"zero_stage": 3, "nvme_offload": "true"}, 3, True),
        ({"zero_stage": 1, "cpu_offload": False}, 1, False),
    ):
        zero = read_settings(config).fields["deepspeed"]["zero_optimization"]
        assert (zero["stage"], "offload_optimizer" in zero) == (stage, offloads)
    assert [read_settings({"attention_type": name}).attention for name in ("flash", "other")] == ["sdpa", None]
    for fields, stage in (({}, 2), ({"zero_stage": 1}, 1), ({"fsdp": True, "fsdp_config": {"version": 2}}, 3)):
        on = OPTIMIZATIONS["cpu_offload"].switch_on(read_settings({**fields, "optim": "adamw_8bit"}))
        assert on.fields["optim"] == "adamw_torch" and "fsdp" not in on.fields
        assert on.fields["deepspeed"]["zero_optimization"]["stage"] == stage
        assert on.fields["deepspeed"]["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    asked = []

    def peak(settings):
        asked.append(settings.fields.get("bf16"))
        if "8bit" in settings.fields.get("optim", ""):
            raise InputError("none here")
        return 100 - 30 * bool(settings.fields.get("bf16")) - 20 * (settings.attention == "sdpa")

    savings = list(predict_savings(Settings({"bf16": True}, "sdpa"), peak))
    assert [one["memory_savings"] for one in savings] == [0, 20, 30, None, 0, 0]
    assert savings[3]["not_predicted"] == "none here" and len(asked) == 7


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


def test_causes_of_growth_are_distinguished(subtests):
    for kind in ("leak", "fragmentation", "longer data", "other process", None):
        with subtests.test(kind):
            assert scenario(kind).label() == kind


def _growth(capacity: int, **series) -> str | None:
    found, nothing = GrowthDiagnosis(capacity), dict.fromkeys(("resting", "peak", "reserved", "elements"), 0)
    for values in zip(*series.values(), strict=True):
        found.observe(Observation(**nothing | dict(zip(series, values, strict=True))))
    return found.label()


def test_how_much_has_to_grow():
    """A fiftieth of the capacity, twice what neighbors differ by, in three steps of each quarter."""

    def steps(*quarters, noise=0):
        return [size + noise * (number == 1) for size in quarters for number in range(3)]

    for label, capacity, series in (
        ("leak", 1000, {"resting": steps(0, 7, 14, 20)}),
        (None, 1000, {"resting": steps(0, 7, 14, 19)}),
        (None, 1000, {"resting": steps(0, 7, 14, 20)[1:]}),
        (None, 1000, {"resting": steps(0, 20, 20, 20)}),
        ("leak", 100, {"resting": steps(0, 7, 14, 20, noise=10)}),
        (None, 100, {"resting": steps(0, 7, 14, 19, noise=10)}),
        ("other process", 1000, {"used_elsewhere": steps(0, 20, 20, 20)}),
        (None, 1000, {"used_elsewhere": [*steps(0, 0, 0, 0), 90]}),
        ("fragmentation", 1000, {"reserved": steps(5, 25, 25, 25)}),
        (None, 1000, {"reserved": steps(5, 25, 25, 25), "peak": steps(5, 25, 25, 25)}),
        ("longer data", 1000, {"peak": steps(5, 25, 25, 25), "reserved": [99] * 12, "elements": steps(1, 3, 3, 3)}),
        (None, 1000, {"peak": steps(5, 25, 25, 25), "reserved": [99] * 12, "elements": steps(3, 1, 1, 1)}),
        (None, 1000, {"peak": steps(5, 25, 25, 25), "reserved": [99] * 12, "elements": steps(1, 3, 1, 3)}),
    ):
        assert _growth(capacity, **series) == label, series


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

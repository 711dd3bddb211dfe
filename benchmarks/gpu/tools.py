"""Part 6: the constants that the estimator assumes, and every tool that reads a card, once on a real one."""

import functools
import subprocess
import sys
import tempfile

from benchmarks.gpu.case import ROOT, Case, Skip
from benchmarks.gpu.training import Setting, make_trainer, used_on_card

MIB = 2**20
SMALL = Setting("tools", "smollm2-135m", {"bf16": True}, {}, micro=2, length=256)
NAMES = (
    "constants",
    "snapshot",
    "snapshot_on_oom",
    "phase_peaks",
    "monitor",
    "doctor",
    "attention",
    "allocator_setting",
    "compile",
)


def cases(rehearse: bool) -> list[Case]:
    """The constants come first: every prediction of device bytes has them."""
    # allocator_setting sets the variable itself, in the process: it must not come from outside.
    return [
        Case("tools", name, 1 if name == "constants" else 30 + 7 * number, rehearse=rehearse)
        for number, name in enumerate(NAMES)
    ]


def measure(case: Case) -> dict:
    """By the case's name."""
    return globals()[case.name](SMALL.rehearsed() if case.rehearse else SMALL)


def constants(setting: Setting) -> dict:
    """Bytes of context and of cuBLAS's workspace beside what overheads.py assumes, and reached shares of the rates."""
    import torch

    from hf_memopt.estimator import constants as overheads
    from hf_memopt.estimator.accounting.ledger import Peak
    from hf_memopt.hardware import detect

    device = detect()
    assumed = {"peak": Peak(0, {}, 0)}
    overheads.add_workspace(assumed, device)
    found = {"assumed_context_bytes": overheads.context(device), "assumed_workspace_bytes": assumed["peak"].total}
    if not torch.cuda.is_available():
        return {**found, "context_bytes": None, "workspace_bytes": None}
    idle = used_on_card() or 0
    small = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    after_first = (used_on_card() or 0) - idle - torch.cuda.memory_reserved()
    # Rates and kernels: everything that a training step loads.
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    before = torch.cuda.memory_allocated()
    product = left @ right
    workspace = torch.cuda.memory_allocated() - before - product.nbytes
    rate = 2 * size**3 / seconds_of(lambda: torch.mm(left, right, out=product))
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds_of(lambda: target.copy_(source))
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    link = host.nbytes / seconds_of(lambda: target[: host.nbytes].copy_(host, non_blocking=True))
    launch = seconds_of(lambda: small.add_(1), 2000)
    left = right = product = source = target = None  # the training that follows finds an empty card
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(setting, folder, 2).train()
    context = (used_on_card() or 0) - idle - torch.cuda.memory_reserved()
    return {
        **found,
        "context_at_first_tensor_bytes": after_first,
        "context_bytes": context,
        "workspace_bytes": workspace,
        "matmul_flops": rate,
        "copy_bytes_per_second": copied,
        "host_link_bytes_per_second": link,
        "launch_seconds": launch,
        "share_of_matmul_rate": device.bf16_flops and rate / device.bf16_flops,
        "share_of_bandwidth": device.bandwidth and copied / device.bandwidth,
        "share_of_host_link": device.host_link and link / device.host_link,
    }


def seconds_of(function, times: int = 20) -> float:
    """Mean seconds of a call on the card, after three that warm it up."""
    import torch

    for _ in range(3):
        function()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(times):
        function()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1000 / times


def snapshot(setting: Setting) -> dict:
    """snapshot_steps: the file is read, and its peak is the allocator's."""
    import torch

    from hf_memopt import SnapshotCallback
    from hf_memopt.reports.snapshot_analysis import analyze_snapshot as read

    recorder = SnapshotCallback("2", on_oom=False)
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(setting, folder, 2, callbacks=[recorder]).train()
        found = read(recorder.files[0]).to_dict()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {
        "file": recorder.files[0].name,
        "allocator_peak_bytes": peak,
        **{name: value for name, value in found.items() if isinstance(value, int | float)},
    }


def snapshot_on_oom(setting: Setting) -> dict:
    """snapshot_on_oom: the allocator's own failure leaves a file."""
    import torch
    from transformers import Trainer

    from hf_memopt import SnapshotCallback

    recorder = SnapshotCallback("", on_oom=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(setting, folder, 2, Trainer, [recorder])
        forward = trainer.model.forward

        @functools.wraps(forward)  # Trainer keeps the columns that its signature names
        def fail(*args, **kwargs):
            if torch.cuda.is_available():
                torch.empty(2**45, dtype=torch.uint8, device="cuda")
            return forward(*args, **kwargs)

        trainer.model.forward = fail
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            return {"files": [file.name for file in recorder.files]}
    return {"files": [], "reason": "no CUDA: the allocator keeps no history"}


def phase_peaks(setting: Setting) -> dict:
    """PhasePeaks' phases and the counter's peak."""
    import torch

    from hf_memopt.recipe.callbacks import PhasePeaks

    watched = PhasePeaks()
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(setting, folder, 3, callbacks=[watched]).train()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else watched.bytes
    return {"phases": watched.phases, "peak_bytes": peak}


def monitor(setting: Setting) -> dict:
    """What the monitor reads beside NVML, while a model is on the card."""
    import time

    from hf_memopt.monitor.readers import Reader

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(setting, folder, 2)
        trainer.train()
        reader = Reader()
        began = time.perf_counter()
        for _ in range(100):
            reading = reader.read()
        return {
            **reading.to_dict(),
            "nvml_used_bytes": used_on_card(),
            "read_seconds": (time.perf_counter() - began) / 100,
        }


def doctor(setting: Setting) -> dict:
    """hf-memopt doctor, whole."""
    words = [sys.executable, "-c", "from hf_memopt.cli import main; main()", "doctor"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return {"exit_code": done.returncode, "output": (done.stdout + done.stderr)[-3000:]}


def attention(setting: Setting) -> dict:
    """What resolve_attention() chooses, and that a model runs with it."""
    import dataclasses

    from hf_memopt.hardware import detect
    from hf_memopt.hardware.attention import resolve_attention

    chosen = resolve_attention(detect())
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(dataclasses.replace(setting, attention=chosen), folder, 2)
        trainer.train()
    return {"chosen": chosen, "ran": trainer.model.config._attn_implementation}


def allocator_setting(setting: Setting) -> dict:
    """PYTORCH_ALLOC_CONF set in the process before CUDA starts: whether the allocator took it."""
    from hf_memopt.hardware import configure_allocator

    said = configure_allocator()
    import torch

    if not torch.cuda.is_available():
        return {"said": said, "expandable": None}
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    segments = torch.cuda.memory_snapshot()
    return {"said": said, "bytes": kept.nbytes, "expandable": all(one.get("is_expandable") for one in segments)}


def compile(setting: Setting) -> dict:
    """torch_compile=True: trained, its peak beside the plain one's."""
    import torch

    from benchmarks.gpu.training import peaks
    from hf_memopt.hardware.compiler import compiler

    if compiler() is None or not torch.cuda.is_available():
        raise Skip("needs a card and a C++ compiler")
    found = {}
    for name, fields in (("plain", {}), ("compiled", {"torch_compile": True})):
        with tempfile.TemporaryDirectory() as folder, peaks() as peak:
            make_trainer(setting, folder, 3, **fields).train()
        found[name] = dict(peak)
    return found

"""Part 6: every tool that reads a card, once on a real one. What predictions assume of it: hf-memopt calibrate."""

import functools
import tempfile

from benchmarks.gpu.case import Case
from hf_memopt.calibration.processes import Skip
from hf_memopt.calibration.readings import peaks, used_on_card
from hf_memopt.calibration.training import Setting, make_trainer

MIB = 2**20
SMALL = Setting("tools", "smollm2-135m", {"bf16": True}, {}, micro=2, length=256)
NAMES = ("snapshot", "snapshot_on_oom", "phase_peaks", "monitor", "compile")


def cases(rehearse: bool) -> list[Case]:
    """A case a tool."""
    return [Case("tools", name, 37 + 7 * number, rehearse=rehearse) for number, name in enumerate(NAMES)]


def measure(case: Case) -> dict:
    """By the case's name."""
    return globals()[case.name](SMALL.rehearsed() if case.rehearse else SMALL)


def snapshot(setting: Setting) -> dict:
    """snapshot_steps: the file is read, and its peak is the allocator's."""
    import torch

    from hf_memopt import SnapshotCallback
    from hf_memopt.contrib.snapshots.snapshot_analysis import analyze_snapshot as read

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

    from hf_memopt.recipe.phase_peaks import PhasePeaks

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


def compile(setting: Setting) -> dict:
    """torch_compile=True: trained, its peak beside the plain one's."""
    import torch

    from hf_memopt.hardware.compiler import compiler

    if compiler() is None or not torch.cuda.is_available():
        raise Skip("needs a card and a C++ compiler")
    found = {}
    for name, fields in (("plain", {}), ("compiled", {"torch_compile": True})):
        with tempfile.TemporaryDirectory() as folder, peaks() as peak:
            make_trainer(setting, folder, 3, **fields).train()
        found[name] = dict(peak)
    return found

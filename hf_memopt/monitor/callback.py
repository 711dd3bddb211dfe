"""MemoryCallback logs memory together with the loss, in any Trainer."""

import json
import logging
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from hf_memopt.hardware.detection import usable_processors
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.monitor.growth import ADVICE, GrowthDiagnosis, Observation
from hf_memopt.monitor.monitor import MemoryMonitor
from hf_memopt.monitor.readers import Reading
from hf_memopt.monitor.waiting import DataWait, DiskWait
from hf_memopt.redaction import redact

logger = logging.getLogger(__name__)
LOG_FILE = "memory_log.jsonl"
_SPEEDS = ("tokens_per_second", "data_wait_share", "device_busy_share", "disk_wait_share")


class MemoryCallback(TrainerCallback):
    """Logs memory at every logging step, evaluation and save: to the Trainer's trackers and to memory_log.jsonl.

    Pass it to any Trainer (`callbacks=[MemoryCallback()]`), or call attach(), which puts it before the Trainer's own
    trackers, so that they get its figures too. MemoryTrainer has one already.

    It also logs why a run may be slow: `data_wait_share` (share of step time spent waiting for batches),
    `device_busy_share` (from NVML or amdsmi) and `disk_wait_share` (of the host's processor time, on Linux).

    Args:
        memory_args: MemoryArguments, for thresholds and limits.
        predicted_peak_bytes: `peak_allocated_bytes` of the run's estimate, which trackers draw beside the
            measured one; the recipes set it.
    """

    def __init__(self, memory_args: MemoryArguments | None = None, predicted_peak_bytes: int | None = None) -> None:
        self.memory_args = memory_args or MemoryArguments()
        self.predicted_peak_bytes = predicted_peak_bytes
        self.monitor: MemoryMonitor | None = None
        self.growth: GrowthDiagnosis | None = None
        self._last_tokens: tuple[float, int] | None = None
        self._last_label: str | None = None
        self._peak_before = 0  # bytes, when training began: of loading, or of what the process did before
        self.data_wait, self._disk_wait = DataWait(), DiskWait()
        # Set by MemoryTrainer: tensor elements and peak bytes of the last step, and tokens so far.
        self.elements = self.near_peak = self.tokens = 0
        self.note = ""  # what MemoryTrainer changed since the last dashboard line

    def attach(self, trainer) -> "MemoryCallback":
        """Become the trainer's first callback, with figures for the trackers but not on the console."""
        callbacks = trainer.callback_handler.callbacks
        for console in [each for each in callbacks if isinstance(each, ProgressCallback | PrinterCallback)]:
            hidden: dict[str, float] = {}
            index = callbacks.index(console)
            callbacks[index : index + 1] = [_HideFigures(hidden), console, _HideFigures(hidden, back=True)]
        callbacks.insert(0, self)
        return self

    def on_train_begin(self, args, state, control, **kwargs):
        self.monitor = self.monitor or MemoryMonitor.of(self.memory_args, args.device)
        reading = self.monitor.reader.read()
        self.growth, self._peak_before = GrowthDiagnosis(reading.capacity), reading.peak_allocated
        self._last_tokens = (time.perf_counter(), max(self.tokens, state.num_input_tokens_seen))
        self.data_wait.reset()

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.data_wait.reset()

    def on_step_begin(self, args, state, control, **kwargs):
        self.data_wait.step_begins()

    def on_step_end(self, args, state, control, **kwargs):
        self.data_wait.step_ends()
        reading = self.monitor.reader.read()  # after zero_grad
        used_elsewhere = max(0, reading.used - reading.reserved) if self.monitor.reader.kind != "cpu" else 0
        peak = self.near_peak or reading.peak_allocated
        self.growth.observe(Observation(reading.allocated, peak, reading.reserved, self.elements, used_elsewhere))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None or "loss" not in logs or self.monitor is None:
            return
        reading = self.monitor.reader.read()
        figures = self._figures(args, state, reading)
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)
        self._write(args, state, "train", reading, figures)
        label = self.growth.label()
        if label != self._last_label:
            self._last_label = label
            if label is not None:
                logger.warning("memory grows: %s: %s", label, ADVICE[label])
                if state.is_world_process_zero:
                    append(args.output_dir, {"event": "memory_grows", "step": state.global_step, "label": label})
        notes = [self.note, f"memory grows: {label}" if label else ""]
        line = self.monitor.dashboard(
            state.global_step, self._at_peak(reading), ", ".join(note for note in notes if note)
        )
        self.note = ""
        if line and state.is_world_process_zero:
            print(line, flush=True)
        self.data_wait.reset()

    def on_evaluate(self, args, state, control, **kwargs):
        self._log_phase(args, state, "eval")

    def on_save(self, args, state, control, **kwargs):
        self._log_phase(args, state, "save")

    def _at_peak(self, reading: Reading) -> Reading:
        """The reading with the step's peak as `allocated`: when it is logged, activations are freed already."""
        of_training = reading.peak_allocated if reading.peak_allocated != self._peak_before else 0
        return replace(reading, allocated=max(reading.allocated, self.near_peak or of_training))

    def _log_phase(self, args, state, phase: str) -> None:
        if self.monitor is not None:
            self._write(args, state, phase, self.monitor.reader.read(), {})
            self.data_wait.reset()

    def _figures(self, args, state, reading: Reading) -> dict[str, float]:
        """Figures for trackers: GiB, shares and tokens a second; peaks and data_wait_share are the largest of all
        processes."""
        waited = round((self.data_wait.share() or 0.0) * 10**4)  # an integer, like the bytes it is reduced with
        peak, reserved, waited = _largest(args, reading.peak_allocated, reading.peak_reserved, waited)
        figures = {
            "memory/peak_allocated_gib": round(peak / 2**30, 4),
            "memory/peak_reserved_gib": round(reserved / 2**30, 4),
            "memory/allocated_gib": round(reading.allocated / 2**30, 4),
            "memory/peak_share_of_capacity": round(peak / reading.capacity, 4),
            "memory/free_on_device_gib": round(reading.free / 2**30, 4),
            "memory/host_resident_gib": round(reading.host_resident / 2**30, 4),
            "memory/allocator_retries": reading.retries,
            "data_wait_share": waited / 10**4,
        }
        if self.predicted_peak_bytes is not None:
            figures["memory/predicted_peak_allocated_gib"] = round(self.predicted_peak_bytes / 2**30, 4)
        shares = {"device_busy_share": self.monitor.reader.busy(), "disk_wait_share": self._disk_wait.share()}
        for name, share in shares.items():
            if share is not None:
                figures[name] = round(share, 4)
        before = self._last_tokens
        current = (time.perf_counter(), max(self.tokens, state.num_input_tokens_seen))
        if current[1] > before[1]:
            figures["tokens_per_second"] = round((current[1] - before[1]) / (current[0] - before[0]), 1)
        self._last_tokens = current
        return figures

    def _write(self, args, state, phase: str, reading: Reading, figures: dict[str, Any]) -> None:
        if not state.is_world_process_zero:
            return
        line = {"step": state.global_step, "phase": phase, "time": round(time.time(), 3), **reading.to_dict()}
        line["status"] = self.monitor.status(self._at_peak(reading).utilization)
        line |= {name: figures[name] for name in _SPEEDS if name in figures}
        if figures:
            line |= {"dataloader_num_workers": args.dataloader_num_workers, "processors": usable_processors()}
        append(args.output_dir, line)


class _HideFigures(TrainerCallback):
    """Removes the memory figures before the console prints the logs; a second one puts them back after it."""

    def __init__(self, hidden: dict[str, float], back: bool = False) -> None:
        self.hidden, self.back = hidden, back

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.back:
            if logs is not None:
                logs.update(self.hidden)
            self.hidden.clear()
            return
        for name in [name for name in logs or () if name.startswith("memory/")]:
            self.hidden[name] = logs.pop(name)


def append(folder: str, line: dict[str, Any]) -> None:
    """Append a line to a run's memory_log.jsonl, without secrets. Where that fails, the run continues without it."""
    path = Path(folder) / LOG_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(redact(line), default=str) + "\n")
    except OSError as error:
        _warn_once(path, error.strerror)


@cache
def _warn_once(path: Path, reason: str) -> None:
    logger.warning("cannot write to %s (%s): readings are not kept", path, reason)


def _largest(args, *sizes: int) -> tuple[int, ...]:
    """The largest value of each size over all processes."""
    if args.world_size == 1:
        return sizes
    largest = torch.tensor(sizes, dtype=torch.int64, device=args.device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return tuple(largest.tolist())

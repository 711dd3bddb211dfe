"""A calibration: measured one after another, kept after each, resumed where it ended."""

import dataclasses
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hf_memopt.contrib.calibration.measurements import (
    Measurement,
    constants_from,
    measure,
    measurements,
    reserved_errors,
)
from hf_memopt.contrib.calibration.processes import Processes
from hf_memopt.errors import InputError
from hf_memopt.files import is_there, read_json, user_path, write_json
from hf_memopt.hardware import Hardware, detect
from hf_memopt.hardware.measured import FORMAT, device_path, parse_device_file, versions_here
from hf_memopt.packages import installed_versions

_ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
_SLOW = 20  # times the limit that a rehearsal gets: a loaded CPU is no reason to fail it
_PACKAGES = ("transformers", "accelerate", "peft", "hf_memopt")


class Session:
    """The measurements of one device.

    Attributes:
        device: that is measured.
        rehearsal: played on the CPU.
        found: measurement -> its outcome, of this and of earlier calls.
        waiting: what is still to be measured.

    Args:
        rehearse: try every measurement on the CPU.
        export: file for a rehearsal's results, which are kept nowhere else.
        fresh: measure again what was measured.

    Raises:
        InputError: there is no device to calibrate, or the results cannot be written.
    """

    def __init__(self, rehearse: bool, export: Path | None, fresh: bool) -> None:
        self.rehearsal = rehearse
        self._env = _ON_CPU if rehearse else {}
        self._processes = Processes("hf_memopt.contrib.calibration.warm")
        self.device, self.versions = self._describe()
        self._path = export if rehearse else device_path(self.device, self.versions)
        self.rows: dict[str, dict] = {} if fresh else self._earlier()
        every = measurements(self.device, rehearse)
        measured = {name for name, row in self.rows.items() if row.get("outcome") == "measured"}
        self.waiting = [measurement for measurement in every if measurement.name not in measured]
        self.count = len(every)
        self._keep()  # a folder that cannot be written to is refused before anything is measured

    def _describe(self) -> tuple[Hardware, dict[str, str | None]]:
        """Asked in a process of its own: to ask CUDA for a card's properties starts it."""
        if not self.rehearsal:
            check_device()
        answer = self._processes.run(_description, 120, self._env)
        if answer["outcome"] != "measured":
            raise InputError(f"this machine cannot be described: {answer['reason'][-300:]}")
        device = Hardware(**answer["device"])
        if self.rehearsal:
            device = dataclasses.replace(device, label=f"rehearsal on {device.label}")
        return device, answer["versions"]

    def _earlier(self) -> dict[str, dict]:
        """The measurements of earlier calls; nothing where their file is damaged or of another kind."""
        if self._path is None or not is_there(self._path):
            return {}
        try:
            content = read_json(self._path)
            same = parse_device_file(content).rehearsal == self.rehearsal
            rows = content["measurements"]
            constants_from(rows, self.device), reserved_errors(rows)
            return rows if same and all(isinstance(row["date"], str) for row in rows.values()) else {}
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):  # InputError is a ValueError
            return {}

    def run(self, budget: float, say: Callable[[str], None]) -> None:
        """Measure what is waiting, until the budget is spent; each outcome is in the file before the next begins.

        Args:
            budget: seconds; nothing begins that might outlast them.
            say: called with a line for each outcome.
        """
        deadline = time.monotonic() + budget
        for number, measurement in enumerate(list(self.waiting), self.count - len(self.waiting) + 1):
            remaining = deadline - time.monotonic()
            if remaining < min(20, measurement.limit):
                say(f"the budget is spent: {len(self.waiting)} of {self.count} are left for the next call")
                return
            row = self._measure(measurement, remaining)
            self.waiting.remove(measurement)
            say(f"[{number}/{self.count}] {row['seconds']:5.1f} s  {measurement.name}: {_outcome(row)}")

    def _measure(self, measurement: Measurement, remaining: float) -> dict[str, Any]:
        began = time.monotonic()
        limit = min(_SLOW * measurement.limit if self.rehearsal else measurement.limit, remaining)
        row = measure(self._processes, measurement, self.device, self._env, limit)
        row |= {"seconds": round(time.monotonic() - began, 1), "date": datetime.now(UTC).date().isoformat()}
        self.rows[measurement.name] = row
        self._keep()
        return row

    def _keep(self) -> None:
        """Write what has been measured so far; of a rehearsal without --export nothing is kept.

        Raises:
            InputError: the folder cannot be written to, or its disk is full.
        """
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, self.content())
        except OSError as error:
            fix = "give another --export" if self.rehearsal else "set HF_MEMOPT_CACHE to a folder that can"
            raise InputError(f"{self._path.parent} cannot be written to: {error.strerror}: {fix}") from error

    def content(self) -> dict[str, Any]:
        """The file: what read_device_file() reads, and every measurement."""
        device = ("name", "label", "backend", "architecture", "memory")
        dates = [row["date"] for row in self.rows.values() if row["outcome"] == "measured"]
        return {
            "format": FORMAT,
            "rehearsal": self.rehearsal,
            "device": {name: getattr(self.device, name) for name in device},
            "versions": self.versions,
            "date": max(dates, default=datetime.now(UTC).date().isoformat()),
            "command": f"hf-memopt calibrate{' --rehearse' * self.rehearsal}",
            "constants": constants_from(self.rows, self.device),
            "reserved_errors": reserved_errors(self.rows),
            "measurements": self.rows,
        }

    def export(self, path: Path) -> None:
        """Write a file to share: without what a failed measurement printed, which may hold paths and names."""
        shared = {
            name: {key: value for key, value in row.items() if key != "reason"} for name, row in self.rows.items()
        }
        try:
            write_json(path, self.content() | {"measurements": shared})
        except OSError as error:
            raise InputError(f"--export {path} cannot be written: {error.strerror}") from error


def check_device() -> None:
    """Refuse a machine that has nothing to calibrate.

    Raises:
        InputError: PyTorch sees no card.
    """
    import torch

    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        raise InputError(
            "PyTorch sees no CUDA, ROCm or MPS device here: run hf-memopt calibrate on the machine with the card, or "
            "try every measurement on the CPU with --rehearse"
        )


def export_path(text: str) -> Path:
    """The file of --export.

    Raises:
        InputError: its folder is missing, or it is something else than a calibration.
    """
    path = user_path(text).absolute()
    if not path.parent.is_dir():
        raise InputError(f"--export {path}: there is no folder {path.parent}: make it, or give another file")
    if is_there(path):
        try:
            parse_device_file(read_json(path))
        except ValueError:
            raise InputError(f"--export {path} is there and is no calibration: give another file") from None
    return path


def _description() -> dict[str, Any]:
    device = vars(detect()) | {"sources": {}}
    versions = versions_here() | {"python": platform.python_version()} | installed_versions(_PACKAGES)
    return {"device": device, "versions": versions}


def _outcome(row: dict[str, Any]) -> str:
    if row["outcome"] == "measured":
        return row.get("outcome_of_training", "measured")
    last = row["reason"].strip().splitlines()[-1:] or [""]
    return f"{row['outcome']}: {last[0][-200:]}"

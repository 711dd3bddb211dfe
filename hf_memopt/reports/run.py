"""A run's folder as it was left: memory_report.json, memory_log.jsonl, oom_report.json."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.files import read_json

REPORT, LOG, OOM = "memory_report.json", "memory_log.jsonl", "oom_report.json"


@dataclass(frozen=True)
class Run:
    """What a folder tells.

    Attributes:
        folder: where it is.
        report: memory_report.json; empty where the run did not get that far, or a plain Trainer wrote the log.
        readings: the log's lines with figures, oldest first: `time` (seconds since 1970), `step`, `phase`, bytes.
        events: what happened, oldest first: dicts with `event` and `step`.
    """

    folder: Path
    report: dict[str, Any] = field(default_factory=dict)
    readings: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name


def read_run(directory: str | Path) -> Run:
    """Read a folder that a recipe, MemoryTrainer or MemoryCallback wrote to.

    Raises:
        InputError: no folder, nothing of ours in it, or a file that is none of JSON.
    """
    folder = Path(directory).expanduser()
    if not folder.is_dir():
        raise InputError(f"{directory}: there is no such folder; give a run's output_dir")
    if not any((folder / name).is_file() for name in (REPORT, LOG, OOM)):
        raise InputError(f"{folder} has none of {REPORT}, {LOG} and {OOM}: give the output_dir of a recipe, of "
                         "MemoryTrainer, or of a Trainer with MemoryCallback")  # fmt: skip
    report = _report(folder / REPORT)
    readings, logged = _log(folder / LOG)
    events = report.get("events") or logged
    ended = _report(folder / OOM)
    if ended and not any(event.get("event") == "out_of_memory" for event in events):
        events = [*events, ended]
    events = [*events, *(event for event in logged if event["event"] == "memory_grows" and event not in events)]
    return Run(folder, report, readings, sorted(events, key=_step))


def _step(event: dict[str, Any]) -> int:
    step = event.get("step")
    return step if isinstance(step, int) else 0


def _report(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def entries(log: str) -> Iterator[dict[str, Any]]:
    """The objects of a log's lines; the last line of a killed run may be torn."""
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


def _log(file: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The last training's figures and events; a folder that was used again holds older ones before."""
    if not file.is_file():
        return [], []
    readings, events = [], []
    for entry in entries(file.read_text(encoding="utf-8", errors="replace")):
        if "event" in entry:
            events.append(entry)
        elif "allocated" in entry and "time" in entry:
            if readings and entry.get("step", 0) < readings[-1].get("step", 0):
                readings, events = [], []
            readings.append(entry)
    return readings, events

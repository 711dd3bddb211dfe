"""Reads a run's folder: memory_report.json, memory_log.jsonl, oom_report.json."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.files import check_links, is_there, read_json, user_path
from hf_memopt.redaction import redact
from hf_memopt.reports.fields import EVENT, REPORT, Check
from hf_memopt.reports.log import LARGEST_LOG, Events, Readings, read_log
from hf_memopt.terminal import plain, plain_values

REPORT_FILE, LOG, OOM = "memory_report.json", "memory_log.jsonl", "oom_report.json"


@dataclass(frozen=True)
class Run:
    """The files of a run's folder, checked (reports/fields.py) and without secrets.

    Attributes:
        folder: its path.
        report: memory_report.json; empty where the run ended before it was written, or a plain Trainer wrote the log.
        readings: the log's readings, oldest first: `time` (seconds since 1970), `step`, `phase`, bytes; of a long log
            the highest of neighbours.
        events: dicts with `event` and `step`, oldest first; of very many the latest.
        logged: number of readings in the log.
        left_out: kind of event -> number of older ones that are not in `events`.
    """

    folder: Path
    report: dict[str, Any] = field(default_factory=dict)
    readings: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    logged: int = 0
    left_out: Counter = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """The folder's name, safe to show."""
        return plain(self.folder.resolve().name)


def read_run(directory: str | Path, largest_log: int = LARGEST_LOG) -> Run:
    """Read a folder that a recipe, MemoryTrainer or MemoryCallback wrote to.

    Args:
        largest_log: bytes to read from the log's end.

    Raises:
        InputError: the folder does not exist, has none of our files, or one of them is damaged.
    """
    folder = user_path(directory)
    if not folder.is_dir():
        raise InputError(f"{directory}: there is no such folder; give a run's output_dir")
    if not any(is_there(folder / name) for name in (REPORT_FILE, LOG, OOM)):
        raise InputError(
            f"{folder} has none of {REPORT_FILE}, {LOG} and {OOM}: give the output_dir of a recipe, of "
            "MemoryTrainer, or of a Trainer with MemoryCallback"
        )
    check_links(folder, (REPORT_FILE, LOG, OOM))
    report = _checked(folder / REPORT_FILE, REPORT)
    log = folder / LOG
    readings, logged = read_log(log, largest_log) if is_there(log) else (Readings(), Events())
    events = _merged(report.get("events", ()), logged, read_oom_report(folder))
    return Run(
        folder,
        report,
        readings.to_list(),
        sorted(events.to_list(), key=lambda event: event.get("step", 0)),
        readings.seen,
        events.left_out,
    )


def read_oom_report(folder: Path) -> dict[str, Any]:
    """oom_report.json; empty where there is none.

    Raises:
        InputError: it is damaged.
    """
    return _checked(folder / OOM, EVENT)


def _checked(file: Path, check: Check) -> dict[str, Any]:
    if not is_there(file):
        return {}
    content = plain_values(redact(read_json(file)))
    try:
        check(content, "")
    except InputError as error:
        raise InputError(f"{file}: {error}: the file is damaged; delete it to read the others") from None
    return content


def _merged(reported: list[dict[str, Any]], logged: Events, ended: dict[str, Any]) -> Events:
    """Events of memory_report.json, else of the log; with the end of the run, and growth that only the log has."""
    events = Events() if reported else logged
    for event in reported:
        events.add(event)
    named = {(event.get("step"), event.get("label")) for event in reported if event.get("event") == "memory_grows"}
    for event in logged.to_list() if reported else ():
        if event["event"] == "memory_grows" and (event.get("step"), event.get("label")) not in named:
            events.add(event)
    if ended and not any(event.get("event") == "out_of_memory" for event in events.to_list()):
        events.add(ended)
    return events

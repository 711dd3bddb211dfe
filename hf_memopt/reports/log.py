"""Reads memory_log.jsonl: readings and events, thinned to as many as a page can show."""

import io
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.files import parse_json, read_bytes
from hf_memopt.redaction import redact
from hf_memopt.reports.fields import EVENT, READING
from hf_memopt.terminal import plain_values

LARGEST_LOG = 64 * 2**20  # bytes read from the end: some 200,000 logging steps, in seconds
_LONGEST_LINE = 2**20  # bytes; an event lists at most the samples of one batch
MOST_READINGS = 2000  # more than a chart has pixels for
MOST_EVENTS = 2000  # the latest; older ones are counted
_NEEDED = ("time", "step", "allocated", "peak_allocated")


class Readings:
    """Readings, oldest first, thinned by keeping the highest of neighbours.

    Attributes:
        seen: number of readings added.
    """

    def __init__(self, limit: int = MOST_READINGS) -> None:
        self._limit, self._readings, self.seen = limit, [], 0

    def add(self, reading: dict[str, Any]) -> None:
        if self._readings and reading["step"] < self._readings[-1]["step"]:  # the folder was used for another run
            self._readings, self.seen = [], 0
        self._readings.append(reading)
        self.seen += 1
        if len(self._readings) > 2 * self._limit:
            first, *between, last = self._readings
            pairs = [between[at : at + 2] for at in range(0, len(between), 2)]
            self._readings = [first, *(max(pair, key=lambda reading: reading["allocated"]) for pair in pairs), last]

    def to_list(self) -> list[dict[str, Any]]:
        """Safe to show; only numbers and texts of each line."""
        return [
            {name: plain_values(value) for name, value in reading.items() if isinstance(value, int | float | str)}
            for reading in self._readings
        ]


class Events:
    """The latest events, oldest first.

    Attributes:
        left_out: kind of event -> number of older ones that were dropped.
    """

    def __init__(self, limit: int = MOST_EVENTS) -> None:
        self._limit, self._events, self.left_out = limit, deque(), Counter()

    def add(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        if len(self._events) > self._limit:
            self.left_out[self._events.popleft().get("event", "")] += 1

    def clear(self) -> None:
        self._events.clear()
        self.left_out.clear()

    def to_list(self) -> list[dict[str, Any]]:
        """Safe to show: without secrets and control characters."""
        return [plain_values(redact(event)) for event in self._events]


def read_log(file: Path, largest: int = LARGEST_LOG) -> tuple[Readings, Events]:
    """Readings and events of the last run; a folder that was used again also holds older ones.

    Args:
        largest: bytes to read from the log's end.

    Raises:
        InputError: the file cannot be read, has no line of JSON, or a field is invalid.
    """
    readings, events = Readings(), Events()
    for where, entry in _entries(file, largest):
        try:
            if "event" in entry:
                EVENT(entry, "")
                if "event" in entry:  # EVENT removes it where it is null
                    events.add(entry)
            elif "allocated" in entry and "time" in entry:
                READING(entry, "")
                if missing := [name for name in _NEEDED if name not in entry]:
                    raise InputError(f"{missing[0]} is missing")
                readings.add(entry)
                if readings.seen == 1:
                    events.clear()
        except InputError as error:
            raise InputError(f"{where}: {error}: delete that line, or run again") from None
    return readings, events


def _entries(file: Path, largest: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a log's lines, each with its position. Torn lines of a killed process are skipped."""
    content = read_bytes(file, largest, tail=True)
    number, any_object = 0, False
    for number, line in enumerate(io.BytesIO(content), 1):
        if len(line) > _LONGEST_LINE:
            continue
        try:
            entry = parse_json(line.decode("utf-8"))
        except ValueError:
            continue
        if isinstance(entry, dict):
            any_object = True
            yield f"{file} line {number}" + (" of its end" if len(content) == largest else ""), entry
    if number > 1 and not any_object:
        raise InputError(f"{file}: none of its {number} lines is a JSON object: it is not the log of a run, delete it")

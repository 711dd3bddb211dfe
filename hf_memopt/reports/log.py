"""memory_log.jsonl: a run's readings and events, in a number that a page can show, however long the run was."""

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

LARGEST_LOG = 64 * 2**20  # bytes, of the log's end: some 200,000 logging steps, which are read in seconds
_LONGEST_LINE = 2**20  # bytes; an event names at most the samples of one batch
MOST_READINGS = 2000  # a chart cannot show more
MOST_EVENTS = 2000
_NEEDED = ("time", "step", "allocated", "peak_allocated")


class Readings:
    """Readings, oldest first; of many neighbours the fullest stays.

    Attributes:
        seen: how many there were.
    """

    def __init__(self, most: int = MOST_READINGS) -> None:
        self._most, self._kept, self.seen = most, [], 0

    def add(self, reading: dict[str, Any]) -> None:
        if self._kept and reading["step"] < self._kept[-1]["step"]:  # a folder that was used again
            self._kept, self.seen = [], 0
        self._kept.append(reading)
        self.seen += 1
        if len(self._kept) > 2 * self._most:
            first, *between, last = self._kept
            pairs = [between[at : at + 2] for at in range(0, len(between), 2)]
            self._kept = [first, *(max(pair, key=lambda one: one["allocated"]) for pair in pairs), last]

    def to_list(self) -> list[dict[str, Any]]:
        """As they may be shown; what else a line holds is left out."""
        return [
            {name: plain_values(value) for name, value in one.items() if isinstance(value, int | float | str)}
            for one in self._kept
        ]


class Events:
    """Events, oldest first; of very many the latest.

    Attributes:
        left_out: kind of event -> how many are not in the list.
    """

    def __init__(self, most: int = MOST_EVENTS) -> None:
        self._most, self._kept, self.left_out = most, deque(), Counter()

    def add(self, event: dict[str, Any]) -> None:
        self._kept.append(event)
        if len(self._kept) > self._most:
            self.left_out[self._kept.popleft().get("event", "")] += 1

    def clear(self) -> None:
        self._kept.clear()
        self.left_out.clear()

    def to_list(self) -> list[dict[str, Any]]:
        """As they may be shown."""
        return [plain_values(redact(event)) for event in self._kept]


def read_log(file: Path, largest: int = LARGEST_LOG) -> tuple[Readings, Events]:
    """The last training's readings and events; a folder that was used again holds older ones before.

    Args:
        largest: bytes of the log's end that are read.

    Raises:
        InputError: the file cannot be read, holds no JSON at all, or a line's field has no sense.
    """
    readings, events = Readings(), Events()
    for where, entry in _entries(file, largest):
        try:
            if "event" in entry:
                EVENT(entry, "")
                if "event" in entry:  # it was not null
                    events.add(entry)
            elif "allocated" in entry and "time" in entry:
                _check_reading(entry)
                readings.add(entry)
                if readings.seen == 1:
                    events.clear()
        except InputError as error:
            raise InputError(f"{where}: {error}: delete that line, or run again") from None
    return readings, events


def _check_reading(entry: dict[str, Any]) -> None:
    READING(entry, "")
    for name in _NEEDED:
        if name not in entry:
            raise InputError(f"{name} is missing")


def _entries(file: Path, largest: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a log's lines, each with its place. Lines of a process that was killed are torn, and left out."""
    content = read_bytes(file, largest, tail=True)
    number, found = 0, False
    for number, line in enumerate(io.BytesIO(content), 1):
        if len(line) > _LONGEST_LINE:
            continue
        try:
            entry = parse_json(line.decode("utf-8"))
        except ValueError:
            continue
        if isinstance(entry, dict):
            found = True
            yield f"{file} line {number}" + (" of its end" if len(content) == largest else ""), entry
    if number > 1 and not found:
        raise InputError(f"{file}: none of its {number} lines is a JSON object: it is not a run's log, delete it")

"""The place of a row in its file, for error messages."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_memopt.data.row_files import find_line
from hf_memopt.data.turns import without_nones


@dataclass(frozen=True)
class Place:
    """A row's place. Its line number is looked up in __str__, since only rows with errors are printed.

    Attributes:
        source: dataset name or file.
        number: of the row in its file; in a stream, in reading order, which shuffling changes.
        row: the row itself, in a stream: its line is found by comparing.
        kind: what the message calls a row.
    """

    source: str
    number: int
    row: dict[str, Any] | None = field(default=None, repr=False)
    kind: str = "row"

    def __str__(self) -> str:
        line = self._line()
        order = " in the order that the stream is read" if self.row is not None else ""
        return f"{self.source or 'the data'}: {f'line {line}, ' if line else ''}{self.kind} {self.number}{order}"

    def _line(self) -> int | None:
        path = Path(self.source).expanduser() if self.source else Path()
        if path.suffix not in (".jsonl", ".json", ".csv", ".txt") or not path.is_file():
            return None
        if self.row is None:
            return find_line(path, lambda number, _: number == self.number)
        values = without_nones(self.row)
        return find_line(path, lambda _, row: without_nones(row) == values)

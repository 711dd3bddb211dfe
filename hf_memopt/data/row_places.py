"""Where a row stands, for messages about it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_memopt.data.row_files import line_of
from hf_memopt.data.turns import without_nones


@dataclass(frozen=True)
class Place:
    """A row's place. Its line is looked up when the place is written out: only a row at fault is ever named.

    Attributes:
        source: the data set's name or file.
        number: of the row in its file; of a stream, in the order that it is read, which is not the file's.
        row: of a stream, the row itself, by which its line is found.
        kind: what the message calls it.
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
            return line_of(path, lambda number, _: number == self.number)
        wanted = without_nones(self.row)
        return line_of(path, lambda _, row: without_nones(row) == wanted)

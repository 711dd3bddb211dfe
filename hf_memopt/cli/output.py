"""Print results: one JSON object, or tables for people."""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hf_memopt.redaction import redact
from hf_memopt.terminal import console, plain, show_status


def working(text: str) -> None:
    """Name what is being done, on a terminal only: in a pipe stderr is for errors."""
    if sys.stderr.isatty():
        show_status(f"{text} …")


def progress(text: str) -> None:
    """A line about what takes time."""
    show_status(text)


def bar(share: float, cells: int) -> str:
    """A share as a bar of so many characters."""
    full = round(min(1.0, share) * cells)
    return "█" * full + "░" * (cells - full)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout, without secrets."""
    json.dump(redact(value), sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def verbatim(cell: Any):
    """A cell for rich, without markup: rich would parse `[/x]` in a name and fail."""
    from rich.text import Text

    return Text(plain(str(cell)))


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], frame: bool = True) -> None:
    """A table on stdout. Cells wrap at spaces where the words fit their columns, and nothing is cut off.

    Args:
        frame: lines around cells, which take a character or two of every column.
    """
    from rich.box import HEAVY_HEAD
    from rich.table import Table

    columns = list(columns)
    rows = [[plain(str(cell)) for cell in row] for row in rows]
    table = Table(
        title=verbatim(title) if title else None,
        title_justify="left",
        header_style="bold",
        box=HEAVY_HEAD if frame else None,
        pad_edge=frame,
    )
    out = console()
    padding = 3 * len(columns) + 1 if frame else 2 * len(columns)  # frame and padding
    widths = _column_widths([columns, *rows], out.width - padding)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(verbatim(column), overflow="fold", width=width)
    for row in rows:
        table.add_row(*map(verbatim, row))
    out.print(table)


def _column_widths(rows: list[list[str]], available: int) -> list[int]:
    """Widths that keep words whole: the first column's of any length, the others' of up to 16 characters.

    rich's own widths shrink all columns alike and break words on the way.
    """
    cells = list(zip(*rows, strict=True))
    available = max(available, 4 * len(cells))
    lines = [max((len(line) for cell in column for line in cell.splitlines()), default=0) for column in cells]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in cells]
    first = min(words[0], available * 2 // 3)
    limit = 16
    while limit > 1 and first + sum(min(limit, width) for width in words[1:]) > available:
        limit -= 1
    widths = [first, *(min(limit, width) for width in words[1:])]
    spare = max(0, available - sum(widths))
    # Short columns get all that they lack, long ones equal shares of the rest.
    by_need = sorted(range(len(widths)), key=lambda index: lines[index] - widths[index])
    for done, index in enumerate(by_need):
        share = min(lines[index] - widths[index], spare // (len(widths) - done))
        widths[index] += share
        spare -= share
    return widths

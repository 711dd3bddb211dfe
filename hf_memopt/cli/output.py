"""How results are printed: one JSON object, or tables for people."""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hf_memopt.redaction import redact
from hf_memopt.terminal import plain


def working(text: str) -> None:
    """Name what is being done, on a terminal only: in a pipe stderr is for errors."""
    if sys.stderr.isatty():
        print(f"{text} …", file=sys.stderr, flush=True)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout, without secrets."""
    json.dump(redact(value), sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def verbatim(cell: Any):
    """A cell for rich, without markup: rich would parse `[/x]` in a name and fail."""
    from rich.text import Text

    return Text(plain(str(cell)))


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """A table on stdout. Cells wrap at spaces, names in the first column stay whole, and nothing is cut."""
    from rich.console import Console
    from rich.table import Table

    rows = [list(map(str, row)) for row in rows]
    names = not any(" " in row[0] for row in rows)
    table = Table(title=verbatim(title) if title else None, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        # At least the header's longest word wide: rich would break words to give another column more.
        width = max(map(len, column.split()), default=0)
        table.add_column(verbatim(column), overflow="fold", no_wrap=index == 0 and names, min_width=width)
    for row in rows:
        table.add_row(*map(verbatim, row))
    Console().print(table)

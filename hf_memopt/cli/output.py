"""How results are printed: one JSON object, or tables for people."""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hf_memopt.redaction import redact
from hf_memopt.terminal import plain


def working(text: str) -> None:
    """Say on a terminal what takes its time; in a pipe stderr is for errors."""
    if sys.stderr.isatty():
        print(f"{text} …", file=sys.stderr, flush=True)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout, without secrets."""
    json.dump(redact(value), sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def verbatim(cell: Any):
    """A text for rich as it is: rich would read `[/x]` in a name as markup, and fail."""
    from rich.text import Text

    return Text(plain(str(cell)))


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """A table on stdout. The first column keeps its width, the others fold; nothing is cut."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=verbatim(title), title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(verbatim(column), overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(verbatim, row))
    Console().print(table)

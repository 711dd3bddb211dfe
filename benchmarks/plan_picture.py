"""The picture of a question and its answers in README.md: python benchmarks/plan_picture.py

Draws what results/ways.json has of the two commands, as a terminal shows it; tests/cli/test_ways.py compares.
"""

import os
from pathlib import Path

from docs_tables.markdown import results
from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "plan.svg"


def draw() -> str:
    """The picture, as SVG."""
    console = Console(record=True, width=84, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for row in (row for row in results("ways")["rows"] if row["page"] == "README.md"):
        console.print(Text(f"$ {row['command']}", style="bold"))
        console.print(Text(row["output"]))
    return console.export_svg(title="predicted, before anything runs", unique_id="plan")


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")

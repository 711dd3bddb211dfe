"""What the founding guides say, item by item: the table of docs/guides.md, from docs/guides.toml."""

import tomllib
from collections import Counter

from levers_docs import ROOT, table

STATES = ("works", "differs", "needs a card", "left out")


def guides() -> list[dict]:
    """The guides of docs/guides.toml: `name`, and `section`s of `name` and `rows`."""
    return tomllib.loads((ROOT / "docs/guides.toml").read_text(encoding="utf-8"))["guide"]


def rows() -> list[dict]:
    """Every row of every guide."""
    return [row for guide in guides() for section in guide["section"] for row in section["rows"]]


def items() -> str:
    """A heading a guide and a section, a line an item."""
    parts = [summary()]
    for guide in guides():
        parts.append(f"## {guide['name']}")
        for section in guide["section"]:
            lines = [[_cell(row["item"]), _cell(row["here"]), _cell(state(row))] for row in section["rows"]]
            parts += [f"### {section['name']}", table(["the guide says", "here", "state"], lines)]
    return "\n\n".join(parts)


def summary() -> str:
    """How many items are in which state."""
    found = Counter(row["state"] for row in rows())
    counts = ", ".join(f"{found[state]} {state}" for state in STATES if found[state])
    return f"{sum(found.values())} items: {counts}."


def state(row: dict) -> str:
    """What the page says of a row: its state, why, and what shows it."""
    shown = [_link(name) for name in row.get("tested_by", ())]
    if "command" in row:
        shown.append(f"`{row['command']}`")
    parts = [f"{row['state']}: {row['why']}" if "why" in row else row["state"], ", ".join(shown)]
    return "; ".join(filter(None, parts)) if "why" in row else ": ".join(filter(None, parts))


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../{file})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


TABLES = {"guides": items}

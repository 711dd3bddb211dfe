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
    """One heading per guide and section, one row per item."""
    parts = [summary()]
    for guide in guides():
        parts.append(f"## {guide['name']}")
        for section in guide["section"]:
            lines = [[_cell(row["item"]), _cell(row["here"]), _cell(state(row))] for row in section["rows"]]
            parts += [f"### {section['name']}", table(["the guide says", "here", "state"], lines)]
    return "\n\n".join(parts)


def summary() -> str:
    """How many items are in each state."""
    states = Counter(row["state"] for row in rows())
    counts = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    return f"{sum(states.values())} items: {counts}."


def state(row: dict) -> str:
    """State of a row, why, and the tests or command that show it."""
    evidence = [_link(name) for name in row.get("tested_by", ())]
    if "command" in row:
        evidence.append(f"`{row['command']}`")
    parts = [f"{row['state']}: {row['why']}" if "why" in row else row["state"], ", ".join(evidence)]
    return "; ".join(filter(None, parts)) if "why" in row else ": ".join(filter(None, parts))


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../{file})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


TABLES = {"guides": items}

"""docs/guides.md: what the founding guides say, item by item."""

import tomllib
from collections import Counter

from docs_tables.markdown import (
    ROOT,
    escaped,
    listed,
)

GUIDE_STATES = ("works", "differs", "needs a card", "left out")


def guides() -> list[dict]:
    """The guides of docs/guides.toml: `name`, and `section`s of `name` and `rows`."""
    return tomllib.loads((ROOT / "docs/guides.toml").read_text(encoding="utf-8"))["guide"]


def guide_rows() -> list[dict]:
    """Every row of every guide."""
    return [row for guide in guides() for section in guide["section"] for row in section["rows"]]


def guide_items() -> str:
    """How many items are in each state; then one heading per guide and section, one row per item."""
    states = Counter(row["state"] for row in guide_rows())
    counts = ", ".join(f"{states[state]} {state}" for state in GUIDE_STATES if states[state])
    parts = [f"{sum(states.values())} items: {counts}."]
    columns = {
        "the guide says": lambda row: escaped(row["item"]),
        "here": lambda row: escaped(row["here"]),
        "state": lambda row: escaped(_state(row)),
    }
    for guide in guides():
        parts.append(f"## {guide['name']}")
        for section in guide["section"]:
            parts += [f"### {section['name']}", listed(section["rows"], columns)]
    return "\n\n".join(parts)


def _state(row: dict) -> str:
    """State of a row, why, and the tests or command that show it."""
    evidence = []
    for test in row.get("tested_by", ()):
        file, _, name = test.partition("::")
        evidence.append(f"[{name.removeprefix('test_').replace('_', ' ')}](../{file})")
    if "command" in row:
        evidence.append(f"`{row['command']}`")
    state = f"{row['state']}: {row['why']}" if "why" in row else row["state"]
    return ("; " if "why" in row else ": ").join(filter(None, (state, ", ".join(evidence))))

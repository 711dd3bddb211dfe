"""Answers as they were, whole: FREEZE=1 pytest … writes them anew where they are meant to change."""

import json
import os

from conftest import ROOT

FOLDER = ROOT / "tests" / "frozen"


def check(name: str, value) -> None:
    """Compare a value, of JSON's kinds, with the file of that name."""
    value, path = json.loads(json.dumps(value)), FOLDER / f"{name}.json"
    if os.environ.get("FREEZE"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert value == json.loads(path.read_text(encoding="utf-8"))


def figures(value: float | None) -> float | None:
    """A number to four digits: more of it depends on the processor."""
    return None if value is None else float(f"{value:.4g}")

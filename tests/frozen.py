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
        path.write_text(_lines(value), encoding="utf-8")
    assert value == json.loads(path.read_text(encoding="utf-8"))


def _lines(value) -> str:
    """JSON with a line for each part of a value, so that a difference shows which of them is another."""
    if not value or not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False) + "\n"
    begin, end = "{}" if isinstance(value, dict) else "[]"
    parts = [{key: part} for key, part in value.items()] if isinstance(value, dict) else [[part] for part in value]
    lines = ",\n".join(f" {json.dumps(part, ensure_ascii=False)[1:-1]}" for part in parts)
    return f"{begin}\n{lines}\n{end}\n"


def figures(value: float | None) -> float | None:
    """A number to four digits: more of it depends on the processor."""
    return None if value is None else float(f"{value:.4g}")

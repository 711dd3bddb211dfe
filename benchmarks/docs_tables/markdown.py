"""What the tables of all pages have in common: results, rows as Markdown, and where figures come from."""

import json
from collections.abc import Callable
from datetime import date
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MONTH = 31  # days
GIB, GB = 2**30, 10**9
KINDS = ("parameters", "gradients", "optimizer_states", "activations", "logits", "workspace", "communication")
METHOD_NAMES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


# A column's text: a format string that is filled from the row, or a function of the row.
Cell = str | Callable[[dict], str]


@cache
def results(name: str) -> dict:
    """A benchmark's file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def listed(rows: list[dict], columns: dict[str, Cell]) -> str:
    """A table of one line per row, with columns by their heads."""
    cells = [cell.format_map if isinstance(cell, str) else cell for cell in columns.values()]
    return table(list(columns), [[cell(row) for cell in cells] for row in rows])


def shown(name: str, form: str = ".1f", scale: int = GIB) -> Callable[[dict], str]:
    """A column of a number, in GiB unless said otherwise; empty where a row has none."""
    return lambda row: "" if row.get(name) is None else format(row[name] / scale, form)


def gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.1f}"


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def link(data: dict, up: str = "../") -> str:
    file = f"{data['benchmark']}.json"
    return f"[{file}]({up}benchmarks/results/{file})"


def versions(data: dict) -> str:
    return f"torch {data['versions']['torch']}, transformers {data['versions']['transformers']}"


def predicted(name: str, up: str = "../", verb: str = "Predicted") -> str:
    """Where a table of predictions comes from."""
    data = results(name)
    return f"{verb} {when(data)} with {versions(data)}: {link(data, up)}."


def measured(name: str) -> str:
    """Where a table of measurements comes from."""
    data = results(name)
    machine = f"{data['hardware']['device']}, {data['hardware']['cores']} cores"
    return f"Measured {when(data)} on {machine}, {versions(data)}: {link(data)}."


def when(data: dict) -> str:
    """The date of a result, its commit, and whether it is more than a month older than the newest result."""
    commit = f" ({data['commit'].removesuffix('+')})" if data.get("commit") else ""
    days = (newest() - date.fromisoformat(data["date"])).days
    return f"{data['date']}{commit}" + (", **more than a month before the newest figures**," if days > MONTH else "")


@cache
def newest() -> date:
    """The newest date among the results."""
    paths = (path for path in RESULTS.glob("*.json") if path.stem != "regress")
    return max(date.fromisoformat(results(path.stem)["date"]) for path in paths)

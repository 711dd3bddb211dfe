"""The measured tables of docs/levers.md."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What guides say, beside what was measured: lever -> claim.
CLAIMS = {
    "activation_checkpointing (checkpoint_ratio=1)": "60–80 % of activations, 30–40 % more compute",
    "checkpoint_ratio=0.5": "40–50 % of activations, 15–20 % more compute",
    "activation_compression=int8": "50 % of activations",
    "activation_compression=int8, activation_checkpointing": "70–80 % of activations",
    "bf16": "50 % of weights and activations",
    "optim=adamw_8bit": "8 instead of 12 bytes per weight",
    "adam_mini": "6 instead of 12 bytes per weight",
}


_OLDER = "†"  # measured at another time than the rest of the file


@cache
def results(name: str) -> dict:
    """A benchmark's file."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def source(name: str, data: dict) -> str:
    """Where a table comes from."""
    versions, hardware = data["versions"], data["hardware"]
    return (
        f"Measured {data['date']} on {hardware['device']}, {hardware['cores']} cores, torch {versions['torch']}, "
        f"transformers {versions['transformers']}: [{name}.json](../benchmarks/results/{name}.json)."
    )


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(row: dict, name: str, form: str) -> str:
    return format(row[name], form) if row.get(name) is not None else ""


def levers() -> str:
    data = results("levers")
    rows = [
        [
            row["lever"] + (f" {_OLDER}" if "date" in row else ""),
            f"{row['peak_ratio']:.1%}",
            number(row, "step_time_ratio", ".2f"),
            number(row, "gradient_error", ".1e"),
            number(row, "held_out_loss_ratio", ".4f"),
            f"{row['predicted_error']:+.2%}",
            CLAIMS.get(row["lever"], ""),
        ]
        for row in data["rows"]
    ]
    heads = ["lever", "peak", "step time", "gradient error", "held-out loss ×", "estimate error", "guides say"]
    older = {(row["date"], row["device"]) for row in data["rows"] if "date" in row}
    kept = [f"Rows marked {_OLDER}: {date} on {device}." for date, device in sorted(older)]
    return "\n\n".join((table(heads, rows), " ".join((source("levers", data), *kept))))


def optimizers() -> str:
    data = results("optimizers")
    rows = [
        [
            row["optim"],
            f"{row['state_bytes_per_weight']:.2f}",
            f"{row['step_time_ratio']:.2f}",
            f"{row['held_out_loss']:.3f}",
            f"{row['learning_rate']:.1e}",
        ]
        for row in data["rows"]
        if row["works"]
    ]
    failed = "\n".join(f"* `{row['optim']}`: {row['why']}" for row in data["rows"] if not row["works"])
    heads = ["optimizer", "state bytes per weight", "step time ×", "held-out loss", "learning rate"]
    return f"{table(heads, rows)}\n\nThese did not run:\n\n{failed}\n\n{source('optimizers', data)}"


def presets() -> str:
    data = results("preset_peak")
    rows = [
        [
            row["job"].removeprefix("preset "),
            ", ".join(f"{name}={value}" for name, value in row["levers"].items()),
            f"{row['micro_batch']} of {row['effective_batch']}",
            f"{row['of_plain']:.1%}",
        ]
        for row in data["rows"]
    ]
    heads = ["preset", "plus", "micro-batch of effective batch", "peak, relative to a plain Trainer"]
    return f"{table(heads, rows)}\n\n{source('preset_peak', data)}"


def filled(page: Path, tables: dict[str, Callable[[], str]]) -> str:
    """A page with the tables between its markers regenerated."""
    text = page.read_text(encoding="utf-8")
    for name, make in tables.items():
        marked = re.compile(f"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text = marked.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text)
    return text


TABLES = {"levers": levers, "optimizers": optimizers, "presets": presets}

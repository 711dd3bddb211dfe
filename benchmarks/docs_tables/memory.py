"""docs/memory.md: what is assumed of devices, what was measured on cards, adapters and optimizers."""

import json
import statistics
from pathlib import Path

from docs_tables.markdown import (
    GB,
    RESULTS,
    link,
    listed,
    measured,
    results,
    shown,
    table,
)

from hf_memopt.hardware.constants import TABLE, Constant
from hf_memopt.hardware.measured import MEASURABLE, DeviceFile, read_device_file, show_value

# Why a row is far off: read in the sources; what is only inferred says "probably".
ADAPTER_CAUSES = {
    "full-finetuning-lr_0.00001": "Adam's states are made at the end of the first step, among cached activations, "
    "whose segments they split; the estimator makes them first",
    "prefixtuning-lr_0.001": "the published peak probably is that of generation for 50 samples: prefixes alone make "
    "its KV cache grow token by token, beside what training has cached, and the 99th percentile over training steps "
    "is lower against the peak than in any other row",
    "frod-sparse0.02-lr_0.001": "probably: projections stay in host memory, and each forward copies them",
}


def adapters() -> str:
    """PEFT's adapters: measured, predicted, error, and what is known about the largest errors."""
    data = results("estimator_peft")
    columns = {
        "adapter": lambda row: f"`{row['name']}`" + (" (fitted)" if row["fitted"] else ""),
        "measured (GB)": shown("measured_bytes", ".2f", GB),
        "predicted (GB)": shown("predicted_bytes", ".2f", GB),
        "error": "{error:+.1%}",
        "tokens/s (measured)": "{tokens_per_second:,.0f}",
        "known cause": lambda row: ADAPTER_CAUSES.get(row["name"], ""),
    }
    first = data["rows"][0]
    return (
        f"{listed(sorted(data['rows'], key=lambda row: row['name']), columns)}\n\n"
        f"Fitted: the tokens of the longest batch, {first['seq_len']}, on the row marked so. Repeated: PEFT's loop, "
        "which holds the model's outputs through backward with its KV cache on, and AdaLoRA as peft had it then (peft "
        "0.21 trains its `ranknum`, and keeps every adapter's output for backward). Predicted with "
        f"peft {first['versions']['peft']}, transformers {data['versions']['transformers']}; "
        f"measured by PEFT on an L40S with {first['published_versions']} or later: {link(data)}."
    )


def optimizer_states() -> str:
    """Every `optim`: states and errors of the peak, or why there are none."""
    columns = {
        "optimizer": "`{optim}`",
        "states (MiB)": shown("state_bytes", ".2f", 2**20),
        "measured": shown("measured_state_bytes", ".2f", 2**20),
        "peak": shown("traced_error", "+.2%", 1),
        "refused, or not measured": lambda row: row.get("refused") or row.get("unmeasured") or "",
    }
    return f"{listed(results('estimator_optimizers')['rows'], columns)}\n\n{measured('estimator_optimizers')}"


def assumptions() -> str:
    """A line a row of the table of constants."""
    columns = {
        "constant": "`{name}`",
        "value": lambda row: f"{row['value']:,.0f}" if row["value"] >= 1000 else f"{row['value']:g}",
        "unit": "{unit}",
        "where": "{where}",
        "source": "{source}",
    }
    return listed([{**vars(row), "where": _where(row)} for row in TABLE], columns)


def _where(row: Constant) -> str:
    """Of rows with one name the first that applies counts."""
    backends = ", ".join(row.backends or ())
    if row.cards is not None:
        return f"labels with `{row.cards}`"
    if row.architectures is not None:
        return f"{backends}, {', '.join(row.architectures)}"
    if row.capability is None:
        several = sum(other.name == row.name for other in TABLE) > 1
        return backends or ("elsewhere" if several else "everywhere")
    lowest, highest = row.capability
    return f"{backends}, compute capability {lowest:g} {'and later' if highest > 90 else f'to {highest:g}'}"


def measured_cards(folder: Path = RESULTS) -> str:
    """Constants by device (devices/*.json), then errors by device (gpu/*/tables.json); else that there are none.

    Args:
        folder: of the results.
    """
    files = [read_device_file(path) for path in sorted((folder / "devices").glob("*.json"))]
    runs = [(path.parent, json.loads(path.read_text())) for path in sorted((folder / "gpu").glob("*/results.json"))]
    runs = [(path, run) for path, run in runs if not run["rehearsal"]]
    parts = ([_constants(files)] if files else []) + ([_card_errors(runs)] if runs else [])
    return "\n\n".join(parts) or "Measured on these cards: nothing yet."


def _constants(files: list[DeviceFile]) -> str:
    names = [name for name in MEASURABLE if any(name in file.constants for file in files)]
    heads = ["device", *(MEASURABLE[name].label for name in names), "reserved bytes off by", "measured"]
    rows = [
        [
            file.device["label"],
            *(show_value(name, file.constants[name]) if name in file.constants else "" for name in names),
            _range(list(file.reserved_errors)),
            file.source.partition("(")[2].rstrip(")"),
        ]
        for file in files
    ]
    return table(heads, rows)


def card_errors(folder: Path, kind: str) -> list[float]:
    """Errors of a kind of bytes (allocated | reserved | device) of the training jobs that make gpu measured.

    Args:
        folder: of a device.
    """
    path = folder / "tables.json"
    tables = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    name = f"error of {kind}_bytes"
    return [job[name] for job in tables.get("Memory, predicted beside measured", []) if name in job]


def _card_errors(runs: list[tuple[Path, dict]]) -> str:
    rows = []
    for folder, content in runs:
        errors = [card_errors(folder, kind) for kind in ("allocated", "reserved", "device")]
        date = max((row["date"] for row in content["rows"]), default="")
        rows.append(
            [
                content["hardware"]["label"],
                str(len(content["rows"])),
                *(f"{statistics.median(map(abs, off)):.1%} ({_range(off)})" if off else "" for off in errors),
                f"{date}, torch {content['versions'].get('torch')}, driver {content['driver']}",
            ]
        )
    made = table(["device", "cases", "allocated", "reserved", "device", "measured"], rows)
    return f"{made}\n\nErrors of predictions: the median, and the range."


def _range(values: list[float]) -> str:
    return f"{min(values):+.1%} to {max(values):+.1%}".replace("-", "−") if values else ""


TABLES = {
    "assumptions": assumptions,
    "measured cards": measured_cards,
    "optimizer_states": optimizer_states,
    "adapters": adapters,
}

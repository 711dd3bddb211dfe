"""The models that a preset is for, and their predicted memory: from a file that `make estimates` writes."""

import functools
import json
from pathlib import Path
from typing import Any

from hf_memopt.presets.preset import Preset
from hf_memopt.units import gib

REFERENCE_FILE = Path(__file__).parent / "reference_estimates.json"


@functools.cache
def _rows() -> dict[str, dict[str, Any]]:
    return json.loads(REFERENCE_FILE.read_text(encoding="utf-8"))["estimates"] if REFERENCE_FILE.is_file() else {}


def reference_row(name: str, method: str) -> dict[str, Any]:
    """model, micro_batch, seq_len, strategy, device_bytes, peak_allocated_bytes, host_bytes, capacity_bytes, phase,
    fits, largest (model, device_bytes: a larger one that fits at micro-batch 1, or None); empty where the file does
    not have it."""
    return _rows().get(f"{name} {method}", {})


def reference_estimate(preset: Preset) -> dict[str, Any] | None:
    """The preset's reference_row(); None where the preset was changed or the file does not have it."""
    row = reference_row(preset.name, preset.method)
    settings = {
        "model": preset.reference_model,
        "micro_batch": preset.micro_batch_size,
        "seq_len": preset.seq_len,
        "strategy": preset.strategy,
    }
    return row if row.items() >= settings.items() else None


def largest_model(preset: Preset) -> str | None:
    """Hub id of the largest model that fits at micro-batch 1: its reference model, or a larger one; None where it is
    not known."""
    row = reference_estimate(preset)
    return row and (row["largest"] or row)["model"]


def summarize(estimate: dict) -> str:
    """The estimate in one line."""
    verdict = {True: "fits", False: "does not fit", None: "capacity unknown"}[estimate["fits"]]
    return f"{gib(estimate['device_bytes'])} of {gib(estimate['capacity_bytes'])} (predicted, not measured), {verdict}"

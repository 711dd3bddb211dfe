"""The predicted memory of every preset on its reference model, from a file that estimator.reference writes."""

import json
from pathlib import Path

from hf_memopt.presets.build import build_preset
from hf_memopt.presets.preset import Preset
from hf_memopt.units import gib

REFERENCE_FILE = Path(__file__).parent / "reference_estimates.json"


def reference_estimate(preset: Preset) -> dict | None:
    """model, seq_len, device_bytes, peak_allocated_bytes, host_bytes, capacity_bytes, phase, fits; None where the
    preset was changed or the file does not have it."""
    if not REFERENCE_FILE.is_file():
        return None
    found = json.loads(REFERENCE_FILE.read_text(encoding="utf-8"))["estimates"].get(f"{preset.name} {preset.method}")
    if not found or found["model"] != preset.reference_model:
        return None
    return found if preset.strategy == build_preset(preset.name, preset.method).strategy else None


def summarize(found: dict) -> str:
    """The estimate in one line."""
    verdict = {True: "fits", False: "does not fit", None: "capacity unknown"}[found["fits"]]
    return f"{gib(found['device_bytes'])} of {gib(found['capacity_bytes'])} (predicted, not measured), {verdict}"

"""The clips that are predicted to fit each preset, by video model: a file that benchmarks/video_tiers.py writes."""

import functools
import json
import math
from pathlib import Path
from typing import Any

from hf_memopt.presets.preset import Preset
from hf_memopt.units import gib

TIERS_FILE = Path(__file__).parent / "video_tiers.json"


@functools.cache
def all_tiers() -> tuple[dict[str, Any], ...]:
    """A row for every preset of one device, method and bundled video model.

    preset, method, model, capacity_bytes and max_frames; where that is above 0 also max_pixels_per_frame,
    per_device_train_batch_size, gradient_accumulation_steps and device_bytes, else needed_bytes or refused.
    """
    return tuple(json.loads(TIERS_FILE.read_text(encoding="utf-8"))["tiers"]) if TIERS_FILE.is_file() else ()


def tiers_of(preset: Preset) -> dict[str, dict[str, Any]]:
    """Model -> its row, for a preset and its method."""
    return {row["model"]: row for row in all_tiers() if (row["preset"], row["method"]) == (preset.name, preset.method)}


def summarize(row: dict[str, Any]) -> str:
    """A row in one line."""
    if "refused" in row:
        return row["refused"]
    if not row["max_frames"]:
        return f"nothing fits: {gib(row['needed_bytes'])} at least (predicted, not measured)"
    batch = f"micro-batch {row['per_device_train_batch_size']} × {row['gradient_accumulation_steps']}"
    memory = f"{gib(row['device_bytes'])} of {gib(row['capacity_bytes'])} (predicted, not measured)"
    return f"{limits_in_words(row['max_frames'], row['max_pixels_per_frame'])}, {batch}: {memory}"


def limits_in_words(max_frames: int | None, max_pixels: int | None) -> str:
    """The most frames of a clip that are taken, and their largest size, in words; without the word "frames"."""
    count = "all" if max_frames is None else str(max_frames)
    if max_pixels is None:
        return f"{count} of the model's own size"
    side = math.isqrt(max_pixels)
    return f"{count} of at most {f'{side} × {side}' if side**2 == max_pixels else f'{max_pixels:,}'} pixels"

"""The clips that fit every preset of one device, by video model: python benchmarks/video_tiers.py

Writes hf_memopt/presets/video_tiers.json, so that neither `hf-memopt show` nor the video recipe traces anything for
them. A part of `make estimates`.
"""

import json
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.tracing.parallel import on_all_cores
from hf_memopt.files import write_whole
from hf_memopt.planner.samples.video_tiers import EFFECTIVE_BATCH, NothingFits, TierLimits, choose_tier, tier_job
from hf_memopt.presets import METHODS, Preset, list_presets, preset_by_name
from hf_memopt.presets.tier_file import TIERS_FILE
from hf_memopt.video.processor import read_video_settings

# Larger models are estimated when a run begins, unless their weights alone are too large.
COVERED_MODELS = ("qwen2.5-vl-3b", "qwen2.5-vl-7b")
_UNTRACED = ("dataloader_", "tf32", "torch_compile", "gradient_accumulation_steps")  # what changes no trace


def covered_presets() -> list[str]:
    """Presets that the file has rows of: those for one device whose memory is known."""
    singles = (name for name in list_presets() if preset_by_name(name).processes == 1)
    return [name for name in singles if preset_by_name(name).hardware.backend != "cpu"]


def video_preset(preset: Preset) -> Preset:
    """A preset as the video recipe changes it: bfloat16 weights where it trains all of them and computes in bf16."""
    return replace(preset, dtype="bfloat16") if preset.method == "full" and preset.precision == "bf16" else preset


def tier_row(preset: Preset, model: str, map_fn=on_all_cores) -> dict[str, Any]:
    """A preset's row of the file, for a bundled model: the tier, or why there is none."""
    row = {"preset": preset.name, "method": preset.method, "model": model, "capacity_bytes": preset.hardware.memory}
    try:
        job = tier_job(video_preset(preset), load_config(model), video_settings=read_video_settings(model))
        tier = choose_tier(job, TierLimits(), map_fn=map_fn)
    except NothingFits as short:
        return row | {"max_frames": 0, "needed_bytes": short.needed}
    except InputError as error:  # 4-bit weights on a Mac
        return row | {"max_frames": 0, "refused": str(error)}
    return row | {
        "max_frames": tier.max_frames,
        "max_pixels_per_frame": tier.max_pixels_per_frame,
        "per_device_train_batch_size": tier.micro_batch,
        "gradient_accumulation_steps": EFFECTIVE_BATCH // tier.micro_batch,
        "device_bytes": tier.estimate.device_bytes,
    }


class _Remembered:
    """Maps a function as one_by_one() does, and traces alike jobs once: those of cards that differ in memory alone."""

    def __init__(self):
        self.traces: dict[str, Any] = {}

    def __call__(self, function, items) -> list:
        return [self._trace(function, *item) if len(item) == 2 else function(item) for item in items]

    def _trace(self, function, job: Job, depth: int):
        fields = {name: value for name, value in job.fields.items() if not name.startswith(_UNTRACED)}
        device = {"rocm": "cuda"}.get(job.device.backend, job.device.backend), job.device.discrete_memory
        key = repr((device, depth, job.dtype, fields, job.peft_config, job.quantization_config, job.video))
        if key not in self.traces:
            self.traces[key] = function((job, depth))
        return self.traces[key]


def _rows_of(model_and_method: tuple[str, str]) -> list[dict[str, Any]]:
    rows, map_fn = [], _Remembered()
    model, method = model_and_method
    for name in covered_presets():
        rows.append(tier_row(preset_by_name(name, method), model, map_fn))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    pairs = [(model, method) for model in COVERED_MODELS for method in METHODS]
    rows = [row for rows in on_all_cores(_rows_of, pairs) for row in rows]
    versions = {package: metadata.version(package) for package in ("torch", "transformers", "accelerate", "hf_memopt")}
    content = {"date": datetime.now(UTC).date().isoformat(), "versions": versions, "tiers": rows}
    write_whole(TIERS_FILE, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

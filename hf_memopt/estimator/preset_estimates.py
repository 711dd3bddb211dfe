"""What every preset is predicted to need for the model that it is meant for; `make estimates` writes it.

Kept as a file, so that `hf-memopt show` need not import torch; a test makes some of it anew.
"""

import json
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata

from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.estimator.api import Job, describe, estimate_job
from hf_memopt.files import write_whole
from hf_memopt.presets import METHODS, Preset, get_preset, list_presets
from hf_memopt.presets.accelerate_config import FSDP2
from hf_memopt.presets.arguments import resolve
from hf_memopt.presets.reference import REFERENCE_FILE

_KEPT = ("device_bytes", "peak_allocated_bytes", "host_bytes", "capacity_bytes", "phase", "fits")


def job_of(
    preset: Preset,
    model=None,
    seq_len: int | None = None,
    world_size: int | None = None,
    fields=None,
    lora=None,
    **more,
) -> Job:
    """A preset's job, on its reference model and device unless others are given.

    Args:
        fields, lora: TrainingArguments and LoraConfig fields over the preset's.
        more: further arguments of estimator.prediction.describe.
    """
    given = dict(fields or {})
    preset = replace(preset, seq_len=seq_len or preset.seq_len)
    world_size = preset.processes if world_size is None else world_size
    deepspeed = given.pop("deepspeed", None) or preset.deepspeed_config()
    resolved = resolve(preset, world_size, given) | ({"deepspeed": deepspeed} if deepspeed else {})
    if preset.strategy == "fsdp2":
        resolved.setdefault("fsdp_config", {"activation_checkpointing": FSDP2["fsdp_activation_checkpointing"]})
    if model is None:
        model = preset.reference_model
        model = builtin_model() if model == "builtin" else model
    quantization = more.pop("quantization_config", None)
    if preset.method == "qlora" and quantization is None:
        from transformers import BitsAndBytesConfig

        quantization = BitsAndBytesConfig(**preset.quantization())
    return describe(
        model,
        resolved,
        preset.seq_len,
        more.pop("hardware", preset.hardware),
        preset.peft_config(**(lora or {})),
        preset.dtype,
        quantization_config=quantization,
        world_size=world_size,
        strategy=None if preset.strategy.startswith("zero") else preset.strategy,
        **more,
    )


def reference_estimate(preset: Preset) -> dict:
    """A preset's row of the file."""
    found = estimate_job(job_of(preset)).to_dict()
    return {"model": preset.reference_model, "seq_len": preset.seq_len, **{name: found[name] for name in _KEPT}}


def main() -> None:
    rows = {}
    for name in list_presets():
        for method in METHODS:
            rows[f"{name} {method}"] = reference_estimate(get_preset(name, method))
            print(name, method, rows[f"{name} {method}"], flush=True)
    versions = {package: metadata.version(package) for package in ("torch", "transformers", "accelerate", "hf_memopt")}
    told = {"date": datetime.now(UTC).date().isoformat(), "versions": versions, "estimates": rows}
    write_whole(REFERENCE_FILE, json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()

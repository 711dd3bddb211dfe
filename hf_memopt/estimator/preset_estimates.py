"""The predicted memory of every preset on its reference model; `make estimates` writes it to a file.

The file spares `hf-memopt show` the import of torch; a test estimates a part of it again.
"""

import json
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata

from hf_memopt.compatibility.mesh import is_mesh
from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.errors import InputError, brief
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.tracing.quantization import is_quantized
from hf_memopt.estimator.trl_job import TRL_TASKS, describe_task
from hf_memopt.files import write_whole
from hf_memopt.presets import METHODS, Preset, list_presets, preset_by_name
from hf_memopt.presets.accelerate_config import FSDP2
from hf_memopt.presets.arguments import resolve
from hf_memopt.presets.reference import REFERENCE_FILE

_KEPT = ("device_bytes", "peak_allocated_bytes", "host_bytes", "capacity_bytes", "phase", "fits")


def preset_job(
    preset: Preset,
    model=None,
    *,
    seq_len: int | None = None,
    world_size: int | None = None,
    fields=None,
    lora=None,
    **settings,
) -> Job:
    """A preset's job, on its reference model and device by default.

    Args:
        fields, lora: TrainingArguments and LoraConfig fields that override the preset's.
        settings: further arguments of estimator.job.describe.
    """
    fields = dict(fields or {})
    preset = replace(preset, seq_len=seq_len or preset.seq_len)
    world_size = preset.processes if world_size is None else world_size
    _refuse_second_engine(preset, fields)
    deepspeed = fields.pop("deepspeed", None) or preset.deepspeed_config()
    row = TRL_TASKS.get(settings.get("task"))
    resolved = resolve(preset, world_size, fields, row and row.config_class) | (
        {"deepspeed": deepspeed} if deepspeed else {}
    )
    if preset.strategy == "fsdp2":
        resolved.setdefault("fsdp_config", {"activation_checkpointing": FSDP2["fsdp_activation_checkpointing"]})
    if model is None:
        model = preset.reference_model
        model = builtin_model() if model == "builtin" else model
    quantized = settings.get("quantization_config") is not None or is_quantized(load_config(model))
    if preset.method == "qlora" and not quantized:
        from transformers import BitsAndBytesConfig

        settings["quantization_config"] = BitsAndBytesConfig(**preset.quantization())
    return describe_task(
        model,
        resolved,
        preset.seq_len,
        settings.pop("hardware", preset.hardware),
        peft_config=preset.peft_config(**(lora or {})),
        dtype=preset.dtype,
        world_size=world_size,
        strategy=None if deepspeed or fields.get("fsdp") else preset.strategy,
        **settings,
    )


def _refuse_second_engine(preset: Preset, fields: dict) -> None:
    """As the run would: Preset.training_arguments() refuses an engine beside the preset's."""
    strategy = preset.strategy
    if fields.get("fsdp") and strategy not in ("none", "fsdp2"):
        name = "fsdp"
    elif fields.get("deepspeed") and (strategy == "fsdp2" or is_mesh(strategy)):
        name = "deepspeed"
    else:
        return
    raise InputError(f"{name}={brief(fields[name])} beside strategy {strategy}: leave one of the two out")


def reference_estimate(preset: Preset) -> dict:
    """A preset's row of the file."""
    estimate = estimate_job(preset_job(preset)).to_dict()
    return {"model": preset.reference_model, "seq_len": preset.seq_len, **{name: estimate[name] for name in _KEPT}}


def main() -> None:
    rows = {}
    for name in list_presets():
        for method in METHODS:
            rows[f"{name} {method}"] = reference_estimate(preset_by_name(name, method))
            print(name, method, rows[f"{name} {method}"], flush=True)
    versions = {package: metadata.version(package) for package in ("torch", "transformers", "accelerate", "hf_memopt")}
    content = {"date": datetime.now(UTC).date().isoformat(), "versions": versions, "estimates": rows}
    write_whole(REFERENCE_FILE, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

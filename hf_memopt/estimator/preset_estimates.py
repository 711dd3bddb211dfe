"""The largest model that every preset is predicted to fit, and its memory; `make estimates` writes them to a file.

The file spares `hf-memopt show` the import of torch; a test estimates a part of it again.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata

from hf_memopt.compatibility.engine import deepspeed_config
from hf_memopt.compatibility.mesh import is_mesh
from hf_memopt.compatibility.resolve import fsdp_settings
from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.errors import InputError, brief
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.tracing.model import count_weights, supports_checkpointing
from hf_memopt.estimator.tracing.quantization import is_quantized
from hf_memopt.estimator.tracing.tasks import find_task, infer_task
from hf_memopt.estimator.training_fields import batch_of
from hf_memopt.estimator.trl_job import TRL_TASKS, describe_task, model_task
from hf_memopt.files import write_whole
from hf_memopt.hardware.allocator import expands_segments
from hf_memopt.presets import METHODS, Preset, list_presets, preset_by_name
from hf_memopt.presets.accelerate_config import FSDP2
from hf_memopt.presets.arguments import OLD_NAMES, resolve
from hf_memopt.presets.build import is_chosen
from hf_memopt.presets.reference import REFERENCE_FILE

logger = logging.getLogger(__name__)
# The models that presets are for, the smallest first: of each size one that people fine-tune.
MODELS = (
    "HuggingFaceTB/SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-360M",
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-1B",
    "Qwen/Qwen3-1.7B",
    "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-70B",
)
FILL = 0.9  # share of the memory that a reference model may take
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
    own = fields.pop("deepspeed", None)
    deepspeed = deepspeed_config(own) if own else preset.deepspeed_config()
    if own:
        fields = batch_of(deepspeed) | fields
    device = settings.pop("hardware", preset.hardware)
    if fields.get("use_cpu") and device.backend != "cpu":
        raise InputError(f"use_cpu=true trains on the CPU, and hardware is {device.label}: use hardware=cpu")
    row = TRL_TASKS.get(settings.get("task"))
    resolved = resolve(preset, world_size, fields, row and row.config_class) | (
        {"deepspeed": deepspeed} if deepspeed else {}
    )
    if preset.strategy == "fsdp2" and world_size > 1:
        # The preset's FSDP2 checkpoints activations, unless the user says otherwise.
        own = {OLD_NAMES.get(name, name): value for name, value in fields.items()}
        checkpoints = own.get("activation_checkpointing", FSDP2["fsdp_activation_checkpointing"])
        changed = fsdp_settings(fields.get("fsdp"), fields.get("fsdp_config"))
        resolved["fsdp_config"] = {"activation_checkpointing": checkpoints, **changed}
    if model is None:
        model = preset.reference_model
        model = builtin_model() if model == "builtin" else model
    config = load_config(model)
    if "activation_checkpointing" not in fields:
        _leave_out_checkpointing(config, settings.get("task"), resolved)
    quantized = settings.get("quantization_config") is not None or is_quantized(config)
    if preset.method == "qlora" and not quantized:
        from transformers import BitsAndBytesConfig

        settings["quantization_config"] = BitsAndBytesConfig(**preset.quantization())
    return describe_task(
        model,
        resolved,
        preset.seq_len,
        device,
        peft_config=preset.peft_config(**(lora or {})),
        dtype=preset.dtype,
        world_size=world_size,
        strategy=_strategy(preset, world_size, bool(deepspeed or fields.get("fsdp"))),
        expandable=bool(preset.name) or expands_segments(),
        **settings,
    )


def _strategy(preset: Preset, world_size: int, by_fields: bool) -> str | None:
    """The preset's, which on one process shards nothing; None where fields start the engine."""
    if by_fields:
        return None
    return "none" if world_size == 1 and preset.strategy == "fsdp2" else preset.strategy


def _leave_out_checkpointing(config, task: str | None, resolved: dict) -> None:
    """Without the preset's checkpointing where the model's class has none, as XLNet's: the Trainer would refuse it."""
    if not resolved.get("activation_checkpointing"):
        return
    task = infer_task(config) if task is None else find_task(model_task(task), config)
    if not supports_checkpointing(config, task):
        logger.warning("%s has no activation checkpointing: estimated without the preset's", config.model_type)
        for name in ("activation_checkpointing", "activation_checkpointing_kwargs"):
            resolved.pop(name, None)


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
    """A preset's row of the file, without `largest`: its reference model's memory."""
    estimate = estimate_job(preset_job(preset)).to_dict()
    sizes = {"micro_batch": preset.micro_batch_size, "seq_len": preset.seq_len, "strategy": preset.strategy}
    return {"model": preset.reference_model, **sizes, **{name: estimate[name] for name in _KEPT}}


def largest_that_fits(preset: Preset, models: Sequence[str]) -> dict | None:
    """The reference_estimate() of the largest model that fits at a preset's settings; None where none does.

    Args:
        models: hub ids, the smallest first.
    """
    budget = FILL * preset.hardware.memory
    for model in reversed(models):
        candidate = replace(preset, reference_model=model)
        if _least_bytes(candidate) <= budget:
            row = reference_estimate(candidate)
            if row["device_bytes"] <= budget:
                return row
    return None


def _least_bytes(preset: Preset) -> float:
    """What a preset's model takes at least on one device: a model that is too large by this is not traced."""
    config = load_config(preset.reference_model)
    weights = count_weights(config, infer_task(config))
    # Two bytes a logit, and four of its gradient.
    logits = 6 * preset.micro_batch_size * preset.seq_len * config.vocab_size
    if preset.method != "full":
        return weights * (0.5 if preset.method == "qlora" else 2) + logits
    gradients = 8 * weights + logits  # fp32 weights and their gradients
    return max(gradients, (10 if "8bit" in preset.training["optim"] else 16) * weights)


def preset_row(name: str, method: str) -> dict:
    """A preset's row of the file: on the model that the table names, or on the largest that fits, with a larger one
    that fits at micro-batch 1.

    Raises:
        InputError: no model fits.
    """
    preset = preset_by_name(name, method)
    if is_chosen(name, method):
        return reference_estimate(preset) | {"largest": None}
    row = largest_that_fits(preset, MODELS)
    if row is None:
        raise InputError(f"preset {name}, method {method}: no reference model fits; use a smaller micro_batch")
    larger = MODELS[MODELS.index(row["model"]) + 1 :] if preset.micro_batch_size > 1 else ()
    largest = largest_that_fits(replace(preset, micro_batch_size=1), larger)
    return row | {"largest": largest and {"model": largest["model"], "device_bytes": largest["device_bytes"]}}


def main() -> None:
    rows = {}
    for name in list_presets():
        for method in METHODS:
            rows[f"{name} {method}"] = preset_row(name, method)
            print(name, method, rows[f"{name} {method}"], flush=True)
    versions = {package: metadata.version(package) for package in ("torch", "transformers", "accelerate", "hf_memopt")}
    content = {"date": datetime.now(UTC).date().isoformat(), "versions": versions, "estimates": rows}
    write_whole(REFERENCE_FILE, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

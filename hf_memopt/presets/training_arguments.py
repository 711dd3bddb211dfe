"""Make TrainingArguments of a preset and the user's overrides; settings that cannot work are refused early."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from hf_memopt.compatibility.resolve import launched_strategy, parallel_sizes, resolve_engine
from hf_memopt.compatibility.resolve import world_size as launched_world_size
from hf_memopt.compatibility.setup import check, compile_mode
from hf_memopt.engines.deepspeed import shipped_deepspeed
from hf_memopt.errors import InputError, as_input_error, brief, choose
from hf_memopt.field_values import fit
from hf_memopt.hardware.detection import counterpart, detect
from hf_memopt.presets.batch import batch_settings
from hf_memopt.presets.environment import precision_set
from hf_memopt.presets.trl_configs import check_config_class, preset_fields, sequences_per_sample
from hf_memopt.stack.vocabulary import argument_hints, newest, spelled

logger = logging.getLogger(__name__)


def build_training_arguments(
    preset, output_dir: str, world_size: int | None, overrides: dict[str, Any], config_class: type | None = None
):
    """See Preset.training_arguments."""
    preset.apply_environment()  # before anything below asks the device for its name, which starts CUDA
    kind = check_config_class(config_class)
    values = resolve(preset, world_size, overrides, kind)
    _check(preset, values)
    # OSError and KeyError: of files that a field names, and of keys that are missing in them.
    kinds = (ValueError, TypeError, ImportError, OSError, KeyError, AttributeError, NotImplementedError)
    with as_input_error("training arguments", *kinds), precision_set(preset.environment):
        args = kind(output_dir=output_dir, **spelled(values))
    if args.n_gpu > 1:
        raise InputError(
            f"one process sees {args.n_gpu} GPUs, which the Trainer would feed {args.n_gpu} times the batch "
            "(DataParallel): set CUDA_VISIBLE_DEVICES=0, or start one process a GPU with accelerate launch --multi_gpu"
        )
    return args


def resolve(
    preset, world_size: int | None, overrides: dict[str, Any], config_class: type | None = None
) -> dict[str, Any]:
    """The TrainingArguments fields of a preset under the user's overrides; the devices need not be here.

    Args:
        config_class: TrainingArguments, or a subclass with fields of its own.

    Raises:
        InputError: an unknown field, or batch settings without a solution in whole numbers.
    """
    kind = check_config_class(config_class)
    overrides = newest(overrides)
    hints = {**argument_hints(kind), "effective_batch_size": int | None}
    for name in overrides.keys() - hints.keys():
        raise choose(f"{kind.__name__} field", str(name), hints.keys() - {"effective_batch_size"})
    overrides = fit(hints, overrides)
    # Refuse texts that transformers parses only when training begins, after the model was loaded, and names whose
    # error would list them all.
    from transformers.training_args import OptimizerNames

    names = [member.value for member in OptimizerNames]
    if isinstance(overrides.get("optim"), str) and overrides["optim"] not in names:
        raise choose("optim", overrides["optim"], names)
    for name in ("torch_compile_mode", "torch_compile_backend"):
        if overrides.get("torch_compile") is False and overrides.get(name):
            raise InputError(f"torch_compile=False and {name}={brief(overrides[name])}: leave one of the two out")
    for name, kwargs in overrides.items():
        if name.endswith("_kwargs") and isinstance(kwargs, str) and not kwargs.startswith("{"):
            example = '{"use_reentrant": false}' if "checkpointing" in name else '{"num_cycles": 2}'
            raise InputError(f"{name}={brief(kwargs)} must be a mapping, or its JSON: {example}")
    for pair in (overrides.get("optim_args") or "").replace(" ", "").split(","):
        if pair and pair.count("=") != 1:
            raise InputError(f"optim_args: {brief(pair)} must be name=value, several with commas between them")
    if overrides.get("output_dir") == "":
        raise InputError("output_dir is empty: name a folder to write to")
    micro = max(1, preset.micro_batch_size // sequences_per_sample(kind))
    batch = _batch(dataclasses.replace(preset, micro_batch_size=micro), world_size, overrides)
    return _merge(preset, overrides, preset_fields(preset, kind)) | batch


def _merge(preset, overrides: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """The user's fields over the preset's, without those of the preset that a user's choice rules out.

    Args:
        usual: fields that the preset overrides.
    """
    values = {**usual, **preset.fields}
    asked = overrides.get
    for chosen, names in (
        (asked("fp16"), ("bf16",)),
        (asked("bf16"), ("fp16",)),
        (asked("activation_checkpointing") is False, ("activation_checkpointing_kwargs",)),
        (asked("dataloader_num_workers") == 0, ("dataloader_prefetch_factor", "dataloader_persistent_workers")),
        # The card's own switches mean nothing on a CPU, and transformers refuses tf32 there.
        (asked("use_cpu") and not preset.training.get("use_cpu"), ("tf32", "torch_compile", "dataloader_pin_memory")),
    ):
        for name in names if chosen else ():
            values.pop(name, None)
    values |= {name: value for name, value in overrides.items() if name != "effective_batch_size"}
    if isinstance(name := values.get("deepspeed"), str) and not Path(name).exists() and shipped_deepspeed(name):
        values["deepspeed"] = str(shipped_deepspeed(name))
    kwargs = values.get("activation_checkpointing_kwargs")
    if values.get("activation_checkpointing") and (kwargs is None or isinstance(kwargs, dict)):
        # Any kwargs without use_reentrant select torch's reentrant variant, which loses adapters' gradients.
        values["activation_checkpointing_kwargs"] = {"use_reentrant": False, **(kwargs or {})}
    return values


def _batch(preset, world_size: int | None, overrides: dict[str, Any]) -> dict[str, int]:
    if world_size is None:
        launched = launched_world_size()
        world_size = launched if launched_strategy() else preset.processes
        if world_size != launched:
            logger.warning(
                "preset %s is for %d processes, and this is one: start with accelerate launch, or pass world_size=1",
                preset.name,
                world_size,
            )
    if sizes := overrides.get("parallelism_config"):
        preset = dataclasses.replace(preset, sequence_parallel=parallel_sizes(sizes)["sp"])
    batches = preset.batches(world_size)
    effective = overrides.get("effective_batch_size")
    micro, accumulation = batch_settings(
        preset.effective_batch_size if effective is None else effective,
        preset.micro_batch_size,
        batches,
        overrides.get("per_device_train_batch_size"),
        overrides.get("gradient_accumulation_steps"),
    )
    if effective is not None and micro * accumulation * batches != effective:
        raise InputError(
            f"effective_batch_size={effective} is not per_device_train_batch_size {micro} × "
            f"gradient_accumulation_steps {accumulation} × {batches} processes: leave one of the three out, or set "
            f"effective_batch_size={micro * accumulation * batches}"
        )
    return {
        "per_device_train_batch_size": micro,
        "per_device_eval_batch_size": overrides.get("per_device_eval_batch_size", micro),
        "gradient_accumulation_steps": accumulation,
    }


def _check(preset, values: dict[str, Any]) -> None:
    """Refuse a device that this machine lacks, and combinations that do not work under the launched engine."""
    use_cpu = bool(values.get("use_cpu"))
    hardware = preset.hardware if use_cpu else _present(preset)
    engine = resolve_engine(values, mesh=preset.strategy if preset.mesh else None)
    check(
        preset.setup(
            optim=str(getattr(values.get("optim"), "value", values.get("optim", "adamw_torch_fused"))),
            **engine.setup(),
            device="cpu" if use_cpu else hardware.backend,
            precision="bf16" if values.get("bf16") else "fp16" if values.get("fp16") else "fp32",
            native_bf16=hardware.native_bf16,
            label=hardware.label,
            activation_checkpointing=bool(values.get("activation_checkpointing")),
            auto_find_batch_size=bool(values.get("auto_find_batch_size")),
            accumulates=values["gradient_accumulation_steps"] > 1,
            compile_mode=compile_mode(values.get),
        )
    )


def _present(preset):
    """This machine's device of the preset's kind.

    Raises:
        InputError: there is none.
    """
    device = counterpart(preset.hardware)
    if device is None:
        here = detect()
        raise InputError(
            f"preset {preset.name} is for {preset.hardware.label}, and this machine has {here.backend} "
            f"({here.label}): use preset auto, or use_cpu=True to try it on the CPU"
        )
    return device

"""The TrainingArguments fields of a job, and the engine that they start."""

import dataclasses
from math import lcm, prod
from typing import Any

from hf_memopt.compatibility.resolve import parallel_sizes, resolve_engine
from hf_memopt.engines import DDP, FSDP, NO_ENGINE, DeepSpeed, Engine, engine_named
from hf_memopt.engines.deepspeed import deepspeed_config
from hf_memopt.engines.engine import read_settings
from hf_memopt.engines.fsdp import CHECKPOINTING_OFFLOAD, fsdp_settings
from hf_memopt.errors import InputError, brief, choose
from hf_memopt.field_values import check_value, fit
from hf_memopt.levers.selective_checkpointing import period_of
from hf_memopt.stack.versions import EVERY_N_LAYERS, OFFLOADED_INPUTS, has
from hf_memopt.stack.vocabulary import argument_hints, newest


def read_fields(args, config_class: type | None = None) -> dict[str, Any]:
    """The fields that were set: those that differ from their defaults. `deepspeed` becomes a dict.

    Args:
        args: TrainingArguments, or a dict of its fields.
        config_class: the class whose fields a dict has, by default TrainingArguments.

    Raises:
        InputError: a field that TrainingArguments lacks, or a value that it does not take.
    """
    from transformers import TrainingArguments

    check_value("args", TrainingArguments | dict, args)
    kind = (config_class or TrainingArguments) if isinstance(args, dict) else type(args)
    if isinstance(args, dict):
        hints, fields = argument_hints(kind), newest(args)
        for name in fields.keys() - hints.keys():
            raise choose(f"{kind.__name__} field", name, hints)
        fields = fit(hints, fields)
    else:
        defaults = {item.name: item.default for item in dataclasses.fields(kind) if item.init}
        fields = {name: getattr(args, name) for name in defaults if getattr(args, name) != defaults[name]}
        if args.eval_delay is None:  # TrainingArguments.set_evaluate() leaves None in a field of numbers (5.23)
            del fields["eval_delay"]
        fields = newest(fields)
        if not fields.get("fsdp") and not any((fields.get("fsdp_config") or {}).values()):
            fields.pop("fsdp_config", None)  # transformers before 5.10 fills in defaults, without FSDP, too
    _check_checkpointing(fields.get("activation_checkpointing_kwargs"))
    _check_accelerator(fields.get("accelerator_config"))
    if fields.get("torch_compile_mode") or fields.get("torch_compile_backend"):
        fields["torch_compile"] = True  # TrainingArguments.__post_init__ does the same
    for name in ("accelerator_config", "output_dir"):
        fields.pop(name, None)
    fields.setdefault("per_device_train_batch_size", 8)
    fields.setdefault("gradient_accumulation_steps", 1)
    if "optim" in fields:
        fields["optim"] = getattr(fields["optim"], "value", fields["optim"])
    if fields.get("fsdp"):
        fields["fsdp_config"] = fsdp_settings(fields["fsdp"], fields.get("fsdp_config"))
    if fields.get("deepspeed"):
        fields["deepspeed"] = deepspeed_config(fields["deepspeed"])
    elif not isinstance(args, dict):
        fields |= _engine_fields(resolve_engine(args), fields)
    return fields


def read_trainer_fields(trainer) -> dict[str, Any]:
    """read_fields() of a Trainer's arguments, with the engine that `accelerate launch` started."""
    fields = read_fields(trainer.args)
    fields |= _engine_fields(resolve_engine(trainer.args, trainer.accelerator.state), fields)
    if trainer.accelerator.mixed_precision == "fp8":  # matmuls only: tensors saved for backward are bf16's
        fields["bf16"] = True
    return fields


def _engine_fields(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    """An engine that the launcher or a plugin chose, as the TrainingArguments fields that would choose it."""
    if engine.deepspeed is not None:
        return {"deepspeed": engine.deepspeed}
    if engine.fsdp_version is None:
        return {}
    settings = {
        "activation_checkpointing": engine.checkpointing,
        "version": engine.fsdp_version,
        "reshard_after_forward": engine.reshards,
        "cpu_offload": engine.offload_params,
        CHECKPOINTING_OFFLOAD: engine.offloads_inputs,
    }
    return {"fsdp": True, "fsdp_config": fsdp_settings(fields.get("fsdp"), fields.get("fsdp_config")) | settings}


def _check_checkpointing(kwargs: Any) -> None:
    """Refuse keys that the installed transformers does not know: layers take and ignore them."""
    for key, since in (("every_n_layers", EVERY_N_LAYERS), ("offload", OFFLOADED_INPUTS)):
        if isinstance(kwargs, dict) and key in kwargs and not has("transformers", since):
            raise InputError(
                f"activation_checkpointing_kwargs.{key}={brief(kwargs[key])} needs transformers {since} or newer, and "
                "is ignored by this one: use checkpoint_ratio of MemoryArguments, or leave it out"
            )


def sharing_processes(fields: dict[str, Any], engine: Engine, world_size: int, launched: bool) -> int:
    """The processes that share the tokens of a sample; 1 where each has whole samples. Their setting is taken from the
    fields: a trace divides by itself.

    Args:
        launched: the fields are this process's, whose launcher may have said so, too.

    Raises:
        InputError: a size that the engine does not have, or that is not predicted.
    """
    config = fields.pop("parallelism_config", None)
    sizes = parallel_sizes(config) if config or launched else {}
    if not sizes or engine.by_transformers:
        return 1
    name = "cp" if sizes["cp"] > 1 else "sp"
    shared, what = sizes[name], f"parallelism_config.{name}_size={sizes[name]}"
    if shared > 1 and (engine.deepspeed is None) == (name == "sp"):
        needed = "DeepSpeed" if name == "sp" else "FSDP2"
        raise InputError(f"{what} needs {needed}, and the strategy is {engine.label}: use {_SHARING[name]}")
    if (size := sizes["tp"]) > 1:
        raise InputError(f"parallelism_config.tp_size={size} is predicted as strategy=tp{size}: leave it out")
    if (size := sizes["dp_replicate"]) > 1 and engine.fsdp_version:
        raise InputError(f"parallelism_config.dp_replicate_size={size} is predicted as strategy=hsdpN: leave it out")
    if sizes["sp"] == 1 and (product := prod(sizes.values())) not in (1, world_size):
        raise InputError(
            f"the sizes of parallelism_config multiply to {product}, and there are {world_size} processes: accelerate "
            f"refuses it; set dp_shard_size={max(1, world_size // (product // sizes['dp_shard']))}"
        )
    return shared


# Sizes of accelerate's ParallelismConfig that divide samples -> where they do.
_SHARING = {
    "sp": "zero1, zero2 or zero3, or cp_size, which divides samples under FSDP2",
    "cp": "fsdp2, or sp_size, which divides samples under DeepSpeed",
}


def _check_accelerator(config: Any) -> None:
    """Refuse what accelerate would make of batches that a trace does not follow."""
    if config is None:
        return
    settings = vars(config) if dataclasses.is_dataclass(config) else read_settings(config, "accelerator_config")
    for name in ("split_batches", "gradient_accumulation_kwargs"):
        if value := settings.get(name):
            instead = "per_device_train_batch_size" if name == "split_batches" else "gradient_accumulation_steps"
            raise InputError(f"accelerator_config.{name}={brief(value)} is not modelled: set {instead} alone")


def check_fsdp(fields: dict[str, Any], strategy: str | None, world_size: int) -> None:
    """Refuse settings of FSDP that nothing would read, and FSDP on one process, which Trainer refuses, too.

    Raises:
        InputError: the setting, and what to do instead.
    """
    fsdp, config = fields.get("fsdp"), fields.get("fsdp_config")
    asked = strategy and engine_named(strategy).fsdp_version
    if config and not fsdp and not asked:
        raise InputError(f"fsdp_config={brief(config)} is read under FSDP alone: use strategy fsdp2, or leave it out")
    if world_size == 1 and (asked or (fsdp and not strategy and not fields.get("deepspeed"))):
        name = f"strategy={strategy}" if strategy else f"fsdp={brief(fsdp)}"
        raise InputError(f"{name} shards a model over several processes: set world_size, or leave it out")


def settle_engine(fields: dict[str, Any], strategy: str | None, world_size: int) -> tuple[dict[str, Any], Engine]:
    """The fields under a strategy, which replaces the engine that they ask for, and the engine that runs."""
    asked = engine_named(strategy) if strategy else NO_ENGINE
    if strategy:
        own = asked.fields(fields)
        replaced = {"deepspeed", "fsdp"} | ({"fsdp_config"} - own.keys())
        fields = {name: value for name, value in fields.items() if name not in replaced} | own
    if asked.by_transformers:
        return fields, asked
    if deepspeed := fields.get("deepspeed"):
        return fields, DeepSpeed.of_config(deepspeed)
    if world_size == 1:
        return fields, NO_ENGINE
    sharded = fields.get("fsdp") or asked.fsdp_version
    return fields, FSDP.of_settings(fields.get("fsdp_config") or {}) if sharded else DDP()


def evaluates(fields: dict[str, Any]) -> bool:
    """True if the job evaluates while it trains."""
    strategy = fields.get("eval_strategy", "no")
    return bool(fields.get("do_eval")) or getattr(strategy, "value", strategy) != "no"


def checkpointing_period(fields: dict[str, Any], memory_args=None) -> int:
    """After how many layers activation checkpointing and the streaming of weights repeat."""
    streamed = period_of(memory_args.weight_streaming_ratio) if getattr(memory_args, "weight_streaming", False) else 1
    if getattr(memory_args, "checkpoint_ratio", None) is not None:
        return lcm(streamed, period_of(memory_args.checkpoint_ratio))
    kwargs = fields.get("activation_checkpointing_kwargs") or {}
    return lcm(streamed, kwargs.get("every_n_layers") or 1 if isinstance(kwargs, dict) else 1)

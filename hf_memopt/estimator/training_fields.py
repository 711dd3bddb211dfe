"""The TrainingArguments fields of a job, and the engine that they start."""

import copy
import dataclasses
from collections.abc import Mapping
from math import lcm
from typing import Any

from hf_memopt.compatibility.engine import (
    Engine,
    deepspeed_config,
    is_true,
    keeps_gathered,
    read_fsdp_version,
    read_settings,
)
from hf_memopt.compatibility.mesh import is_mesh
from hf_memopt.compatibility.resolve import fsdp_settings, resolve_engine
from hf_memopt.errors import InputError, brief, choose
from hf_memopt.field_values import check_value, fit
from hf_memopt.levers.selective_checkpointing import period_of
from hf_memopt.stack.vocabulary import argument_hints, newest

_PARALLEL = ("fsdp2", "ddp", "none")
# Keys of fsdp_config: those that a trace follows or check_fields() refuses, and those of loading and communication.
_FSDP_KEYS = {
    *("version", "activation_checkpointing", "reshard_after_forward", "cpu_offload", "xla", "auto_wrap_policy"),
    *("min_num_params", "transformer_layer_cls_to_wrap", "mixed_precision", "mixed_precision_policy"),
    *("cpu_ram_efficient_loading", "state_dict_type", "sync_module_states", "use_orig_params", "limit_all_gathers"),
    *("forward_prefetch", "backward_prefetch", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"),
}
# DeepSpeed's batch sizes, and the TrainingArguments fields that say the same.
_SIZES = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
_UNLIMITED = 1e9  # elements: DeepSpeed's default of every limit of ZeRO-3 (deepspeed.runtime.zero.config)


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
        fields["fsdp_config"] = _fsdp_settings(fields)
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
    settings = {"activation_checkpointing": engine.checkpointing, "version": engine.fsdp_version}
    settings |= {"reshard_after_forward": engine.reshards, "cpu_offload": engine.offloads}
    return {"fsdp": True, "fsdp_config": _fsdp_settings(fields) | settings}


def _fsdp_settings(fields: dict[str, Any]) -> dict[str, Any]:
    return fsdp_settings(fields.get("fsdp"), fields.get("fsdp_config"))


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
    if config and not fsdp and strategy != "fsdp2":
        raise InputError(f"fsdp_config={brief(config)} is read under FSDP alone: use strategy fsdp2, or leave it out")
    if world_size == 1 and (strategy == "fsdp2" or (fsdp and not strategy and not fields.get("deepspeed"))):
        name = "strategy=fsdp2" if strategy else f"fsdp={brief(fsdp)}"
        raise InputError(f"{name} shards a model over several processes: set world_size, or leave it out")


def batch_of(deepspeed: Mapping[str, Any]) -> dict[str, int]:
    """The batch sizes that a DeepSpeed configuration has as numbers, as TrainingArguments fields."""
    return {name: deepspeed[key] for key, name in _SIZES.items() if deepspeed.get(key, "auto") != "auto"}


def check_fields(fields: dict[str, Any], engine: str, world_size: int) -> None:
    """Refuse an engine's settings that contradict TrainingArguments, or that a trace would leave out.

    Raises:
        InputError: the setting, and what to use instead.
    """
    if engine == "deepspeed":
        for name, size in batch_of(fields["deepspeed"]).items():
            if size != fields[name]:
                raise InputError(
                    f"the DeepSpeed JSON has {brief(size)} and TrainingArguments {fields[name]} for {name}: leave one "
                    'out, or write "auto" in the JSON'
                )
        whole = fields["deepspeed"].get("train_batch_size", "auto")
        batch = world_size * fields["per_device_train_batch_size"] * fields["gradient_accumulation_steps"]
        if whole not in ("auto", batch):
            raise InputError(
                f"the DeepSpeed JSON has train_batch_size={brief(whole)}, and micro-batch × accumulation × processes "
                f'is {batch}: write "auto" in the JSON'
            )
    if engine != "fsdp2":
        return
    settings = fields.get("fsdp_config") or {}
    for key in settings.keys() - _FSDP_KEYS:
        raise choose("key of fsdp_config", str(key), _FSDP_KEYS)
    if fields.get("activation_checkpointing") is False and fsdp_checkpoints(fields):
        raise InputError(
            "activation_checkpointing=false and fsdp_config.activation_checkpointing=true: leave one of the two out"
        )
    for key in ("cpu_offload", "xla"):
        if is_true(settings.get(key)):
            instead = "strategy zero3_offload_cpu" if key == "cpu_offload" else "FSDP of torch"
            raise InputError(f"fsdp_config.{key}=true is not modelled: use {instead}, or leave it out")
    if (policy := settings.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")) != "TRANSFORMER_BASED_WRAP":
        raise InputError(f"fsdp_config.auto_wrap_policy={brief(policy)} is not modelled: use TRANSFORMER_BASED_WRAP")
    reshards = str(settings.get("reshard_after_forward", True)).lower()
    if "hybrid" in reshards or reshards == "no_shard":
        raise InputError(f"fsdp={reshards} is not modelled: use strategy=hsdpN, or ddp for whole models")


def with_strategy(fields: dict[str, Any], strategy: str | None) -> dict[str, Any]:
    """The fields under a strategy, which replaces the engine that they ask for; as they are without one."""
    if not strategy:
        return fields
    engines = {"deepspeed", "fsdp"} if strategy == "fsdp2" else {"deepspeed", "fsdp", "fsdp_config"}
    fields = {name: value for name, value in fields.items() if name not in engines}
    if strategy == "fsdp2":
        return fields | {"fsdp_config": {**_fsdp_settings(fields), "version": 2}}
    if strategy in _PARALLEL or is_mesh(strategy):
        return fields
    return fields | {"deepspeed": deepspeed_config(strategy)}


def engine_name(fields: dict[str, Any], strategy: str | None, world_size: int) -> str:
    """none, ddp, fsdp2, mesh or deepspeed, for fields as with_strategy() returns them."""
    if is_mesh(strategy):
        return "mesh"
    if fields.get("deepspeed"):
        return "deepspeed"
    if world_size == 1:
        return "none"
    return "fsdp2" if strategy == "fsdp2" or fields.get("fsdp") else "ddp"


def traceable_fields(fields: dict[str, Any], engine: str) -> dict[str, Any]:
    """Fields whose job is the same in memory and can be traced.

    accelerate's own activation checkpointing under FSDP2 becomes transformers'. DeepSpeed's batch sizes become "auto",
    because fewer micro-batches are traced than run.
    """
    if engine == "fsdp2" and fsdp_checkpoints(fields):
        return {
            **fields,
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": False},
        }
    if engine != "deepspeed":
        return fields
    config = copy.deepcopy(fields["deepspeed"])
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config[name] = "auto"
    return {**fields, "deepspeed": config}


def fsdp_checkpoints(fields: dict[str, Any]) -> bool:
    """Whether accelerate checkpoints the activations of the layers that it shards."""
    return is_true((fields.get("fsdp_config") or {}).get("activation_checkpointing"))


def fsdp_reshards(fields: dict[str, Any]) -> bool:
    """Whether FSDP frees a layer's gathered weights after its forward pass."""
    return not keeps_gathered((fields.get("fsdp_config") or {}).get("reshard_after_forward", True))


def fsdp_version(fields: dict[str, Any]) -> int:
    """1 or 2."""
    return read_fsdp_version(fields.get("fsdp_config") or {})


def evaluates(fields: dict[str, Any]) -> bool:
    """Whether the job evaluates while it trains."""
    strategy = fields.get("eval_strategy", "no")
    return bool(fields.get("do_eval")) or getattr(strategy, "value", strategy) != "no"


def zero_stage(fields: dict[str, Any]) -> int:
    """DeepSpeed's ZeRO stage; 0 without DeepSpeed."""
    return (fields.get("deepspeed") or {}).get("zero_optimization", {}).get("stage", 0)


def zero_limit(fields: dict[str, Any], name: str) -> float:
    """A limit of ZeRO-3 in elements, such as sub_group_size."""
    value = fields["deepspeed"].get("zero_optimization", {}).get(name, _UNLIMITED)
    return _UNLIMITED if value == "auto" else float(value)


def checkpointing_period(fields: dict[str, Any], memory_args=None) -> int:
    """After how many layers activation checkpointing and the streaming of weights repeat."""
    streamed = period_of(memory_args.weight_streaming_ratio) if getattr(memory_args, "weight_streaming", False) else 1
    if getattr(memory_args, "checkpoint_ratio", None) is not None:
        return lcm(streamed, period_of(memory_args.checkpoint_ratio))
    kwargs = fields.get("activation_checkpointing_kwargs") or {}
    return lcm(streamed, kwargs.get("every_n_layers") or 1 if isinstance(kwargs, dict) else 1)


def peak_rank(fields: dict[str, Any], engine: str, world_size: int) -> int:
    """The process that needs the most memory.

    Under ZeRO-1 and 2 that is the last: it owns the gradients that backward computes first, and holds them from then
    on. Otherwise all need as much as the first, which gets FSDP2's remainder of what does not divide evenly.
    """
    return world_size - 1 if engine == "deepspeed" and zero_stage(fields) < 3 else 0

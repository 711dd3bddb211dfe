"""Resolve the engine that a job really trains under: the one answer for presets, recipes, estimates and trainers."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_memopt.compatibility.launch import chosen_by_launcher, launched_engine, parallel_sizes, world_size
from hf_memopt.engines import DDP, FSDP, NO_ENGINE, DeepSpeed, Engine, MeshEngine
from hf_memopt.engines.deepspeed import deepspeed_config
from hf_memopt.engines.engine import is_true
from hf_memopt.engines.fsdp import CHECKPOINTING_OFFLOAD, fsdp_settings
from hf_memopt.errors import InputError


def resolve_engine(args: Any, state: Any = None, mesh: str | None = None) -> Engine:
    """The engine that a Trainer will start, and its settings.

    Args:
        args: TrainingArguments, or a mapping of its fields.
        state: an AcceleratorState, whose plugins run whatever else is said.
        mesh: the strategy of a model that from_pretrained shards, by its DistributedConfig.

    Raises:
        InputError: two of them ask for engines that differ, or a file cannot be read.
    """
    get = args.get if isinstance(args, Mapping) else lambda name: getattr(args, name, None)
    sharded = [MeshEngine(mesh, "the model's DistributedConfig")] if mesh else []
    plugins = _from_plugins(get, _configured_state(get) if state is None else state)
    arguments = _from_arguments(get)
    launcher = [engine] if (engine := chosen_by_launcher()) else []
    requests = sharded + arguments + plugins + launcher
    for request in requests[1:]:  # only one engine can run
        if (request.name, request.offload) != (requests[0].name, requests[0].offload):
            raise InputError(
                f"{requests[0].source} asks for {requests[0].label} and {request.source} for {request.label}: "
                "leave one of the two out"
            )
    processes = get("world_size") or world_size()
    default = launched_engine() or (DDP() if processes > 1 else NO_ENGINE)
    running = next(iter(sharded + plugins + arguments + launcher), default)
    return replace(running, tp_size=_tp_size(get("parallelism_config")))


def _from_plugins(get, state: Any) -> list[Engine]:
    """Engines of the plugin objects that accelerate was given."""
    deepspeed = getattr(state, "deepspeed_plugin", None)
    if deepspeed is None:
        deepspeed = get("deepspeed_plugin")  # which TrainingArguments made, or the user
    if deepspeed is not None:
        return [DeepSpeed.of_config(deepspeed.hf_ds_config.config, "accelerate's DeepSpeedPlugin")]
    fsdp = getattr(state, "fsdp_plugin", None)
    source = "accelerate's FullyShardedDataParallelPlugin"
    if fsdp is None:
        return []
    # A plugin makes a policy of what it was given (accelerate 1.15): FSDP2's has no switch, only a class.
    offload = fsdp.cpu_offload
    offloads = getattr(offload, "offload_params", type(offload).__name__ == "CPUOffloadPolicy" or offload is True)
    settings = {"version": fsdp.fsdp_version, "activation_checkpointing": fsdp.activation_checkpointing}
    settings |= {"reshard_after_forward": fsdp.reshard_after_forward, "cpu_offload": offloads}
    settings[CHECKPOINTING_OFFLOAD] = getattr(fsdp, CHECKPOINTING_OFFLOAD, False)  # of accelerate 1.15
    return [FSDP.of_settings(settings, source)]


def _from_arguments(get) -> list[Engine]:
    """Engines that TrainingArguments ask for."""
    engines = []
    if deepspeed := get("deepspeed"):
        source = f"deepspeed={deepspeed}" if isinstance(deepspeed, str) else "deepspeed"
        engines.append(DeepSpeed.of_config(deepspeed_config(deepspeed), source))
    if fsdp := get("fsdp"):
        # accelerate takes what is left out from the environment.
        names = ("activation_checkpointing", CHECKPOINTING_OFFLOAD)
        launched = {name: os.environ.get(f"FSDP_{name.upper()}") for name in names}
        engines.append(FSDP.of_settings(launched | fsdp_settings(fsdp, get("fsdp_config")), f"fsdp={fsdp}"))
    return engines


def _tp_size(config: Any) -> int:
    """Processes that share every layer, by the argument's ParallelismConfig or the launcher's."""
    sizes, launched = parallel_sizes(config), parallel_sizes()
    for name, size in launched.items():
        if size > 1 and sizes[name] != size:
            raise InputError(
                f"parallelism_config has {name}_size={sizes[name]} and accelerate launch {name}_size={size}: "
                "leave one of the two out"
            )
    return sizes["tp"]


def _configured_state(get) -> Any:
    """accelerate's state that the script made before TrainingArguments; None where they begin a new one."""
    config = get("accelerator_config")
    if not isinstance(config, Mapping) or not is_true(config.get("use_configured_state")):
        return None
    from accelerate.state import AcceleratorState

    return AcceleratorState() if AcceleratorState._shared_state else None

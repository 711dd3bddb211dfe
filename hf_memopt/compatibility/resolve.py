"""Resolve the engine that a job really trains under: the one answer for presets, recipes, estimates and trainers."""

import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_memopt.engines import DDP, FSDP, NO_ENGINE, DeepSpeed, Engine, MeshEngine
from hf_memopt.engines.deepspeed import BATCH_SIZES, deepspeed_config, missing_batch_size
from hf_memopt.engines.engine import is_true
from hf_memopt.engines.fsdp import CHECKPOINTING_OFFLOAD, fsdp_settings
from hf_memopt.errors import InputError

# Sizes of accelerate's ParallelismConfig; their product is the number of processes.
PARALLEL = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
LAUNCHER = "accelerate launch"  # an Engine's source


def launched_strategy() -> str | None:
    """The strategy that this process was started with.

    Returns:
        `ddp`, `fsdp2` or `fsdp2_offload_cpu` (of either version), or a name as in accelerate_configs/deepspeed;
        None where the process is alone and without an engine.
    """
    engine = launched_engine()
    return engine.strategy if engine else "ddp" if world_size() > 1 else None


def launched_engine() -> Engine | None:
    """The engine that accelerate takes from the environment where nothing else names one; None without any."""
    if is_true(os.environ.get("ACCELERATE_USE_FSDP")):
        names = ("activation_checkpointing", CHECKPOINTING_OFFLOAD, "reshard_after_forward", "offload_params")
        settings = {name: os.environ.get(f"FSDP_{name.upper()}") for name in names}
        version, offload = os.environ.get("FSDP_VERSION", "1"), settings["offload_params"]
        return FSDP.of_settings(settings | {"version": version, "cpu_offload": offload}, LAUNCHER)
    if is_true(os.environ.get("ACCELERATE_USE_DEEPSPEED")):
        return DeepSpeed.of_config(_launched_zero(), LAUNCHER)
    return None


def chosen_by_launcher() -> Engine | None:
    """launched_engine() where a launcher chose its settings.

    accelerate sets ACCELERATE_USE_DEEPSPEED and ACCELERATE_USE_FSDP by itself for a plugin that it is given, and
    TrainingArguments (transformers 5.23, `_setup_devices`) delete the former; what only a launcher sets stays.
    """
    if _zero_file() or "ACCELERATE_DEEPSPEED_ZERO_STAGE" in os.environ:
        return DeepSpeed.of_config(_launched_zero(), LAUNCHER)
    if is_true(os.environ.get("ACCELERATE_USE_FSDP")) and "FSDP_VERSION" in os.environ:
        return launched_engine()
    return None


# Without all of them DeepSpeed asks MPI instead (deepspeed.comm.init_distributed, 0.19.8).
_LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def cannot_start(engine: Engine) -> str | None:
    """The reason that the engine cannot start in this process; None where it can."""
    if engine.fsdp_version and engine.offloads and world_size() > 1 and not _has_cpu_backend():
        return (
            "FSDP clips gradients that it offloads over a CPU backend, and this process has none: launch it with "
            "`accelerate launch --use_fsdp --fsdp_offload_params true`, or set FSDP_OFFLOAD_PARAMS=true"
        )
    return None if engine.deepspeed is None else missing_batch_size(engine.deepspeed) or _missing_launcher()


def _has_cpu_backend() -> bool:
    """True if accelerate starts gloo beside NCCL: where these variables ask for it (1.15, PartialState)."""
    return (
        is_true(os.environ.get("FSDP_OFFLOAD_PARAMS")) or os.environ.get("FSDP_STATE_DICT_TYPE") == "FULL_STATE_DICT"
    )


def _missing_launcher() -> str | None:
    """DeepSpeed's own message is "No module named 'mpi4py'", after the model was made."""
    if all(name in os.environ for name in _LAUNCHERS_VARIABLES):
        return None
    from torch import distributed

    # AzureML and SageMaker have variables of their own, which DeepSpeed reads.
    managed = "AZUREML_EXPERIMENT_ID" in os.environ or "SM_TRAINING_ENV" in os.environ
    if distributed.is_initialized() or managed or importlib.util.find_spec("mpi4py") is not None:
        return None
    script = shlex.quote(os.path.relpath(sys.argv[0])) if os.path.isfile(sys.argv[0]) else "SCRIPT.py"
    return (
        f"DeepSpeed needs a launcher, and nothing launched this process: start it with `torchrun --nproc_per_node 1 "
        f"{script} …` or `deepspeed --num_gpus 1 {script} …`"
    )


def world_size() -> int:
    """The number of processes that train together; 1 where no launcher set WORLD_SIZE."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def parallel_sizes(config: Any = None) -> dict[str, int]:
    """The number of processes that share each dimension.

    Args:
        config: an accelerate.ParallelismConfig; by default what accelerate's YAML says.
    """
    if config is not None:
        return {name: getattr(config, f"{name}_size") or 1 for name in PARALLEL}
    if not is_true(os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        return dict.fromkeys(PARALLEL, 1)
    return {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in PARALLEL}


def sequence_parallel_size() -> int:
    """The number of processes that share one batch's tokens (Ulysses); 1 where accelerate's YAML says nothing."""
    return parallel_sizes()["sp"]


def launched_config_file() -> Path | None:
    """The file that `accelerate launch --config_file` was given, read off the launcher's command line.

    accelerate tells its workers the settings, not the file; None where no launcher is among the ancestors.
    """
    import psutil

    try:
        for ancestor in psutil.Process().parents():
            words = [part for word in ancestor.cmdline() for part in word.split("=", 1)]
            if "launch" in words and "--config_file" in words[:-1]:
                return Path(ancestor.cwd()) / words[words.index("--config_file") + 1]
    except psutil.Error:
        pass  # another user's process: what cannot be read cannot be checked
    return None


def _launched_zero() -> dict[str, Any]:
    """The configuration that accelerate's DeepSpeedPlugin makes of the environment."""
    if file := _zero_file():
        return dict(deepspeed_config(file))
    stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    device = os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
    zero = {"stage": stage, "offload_optimizer": {"device": device}}
    return {"zero_optimization": zero, **dict.fromkeys(BATCH_SIZES, "auto")}


def _zero_file() -> str | None:
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    return None if file in ("none", "None", "") else file


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
    # Engines that TrainingArguments ask for.
    arguments = []
    if deepspeed := get("deepspeed"):
        source = f"deepspeed={deepspeed}" if isinstance(deepspeed, str) else "deepspeed"
        arguments.append(DeepSpeed.of_config(deepspeed_config(deepspeed), source))
    if fsdp := get("fsdp"):
        # accelerate takes what is left out from the environment.
        names = ("activation_checkpointing", CHECKPOINTING_OFFLOAD)
        launched = {name: os.environ.get(f"FSDP_{name.upper()}") for name in names}
        arguments.append(FSDP.of_settings(launched | fsdp_settings(fsdp, get("fsdp_config")), f"fsdp={fsdp}"))
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
    if fsdp is None:
        return []
    # A plugin makes a policy of what it was given (accelerate 1.15): FSDP2's has no switch, only a class.
    offload = fsdp.cpu_offload
    offloads = getattr(offload, "offload_params", type(offload).__name__ == "CPUOffloadPolicy" or offload is True)
    settings = {
        "version": fsdp.fsdp_version,
        "activation_checkpointing": fsdp.activation_checkpointing,
        CHECKPOINTING_OFFLOAD: getattr(fsdp, CHECKPOINTING_OFFLOAD, False),  # of accelerate 1.15
        "reshard_after_forward": fsdp.reshard_after_forward,
        "cpu_offload": offloads,
    }
    return [FSDP.of_settings(settings, "accelerate's FullyShardedDataParallelPlugin")]


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

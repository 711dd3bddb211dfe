"""The launch of this process, from what `accelerate launch` leaves in the environment."""

import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from hf_memopt.engines import FSDP, DeepSpeed, Engine
from hf_memopt.engines.deepspeed import BATCH_SIZES, deepspeed_config, missing_batch_size
from hf_memopt.engines.engine import is_true
from hf_memopt.engines.fsdp import CHECKPOINTING_OFFLOAD

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
    if engine.deepspeed is None:
        return None
    return missing_batch_size(engine.deepspeed) or _missing_launcher()


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

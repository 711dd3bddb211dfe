"""How this process was launched, by what `accelerate launch` leaves in the environment."""

import os
from pathlib import Path

from hf_memopt.compatibility.mesh import is_mesh
from hf_memopt.files import read_json


def launched_strategy() -> str | None:
    """The strategy that this process was started with.

    Returns:
        `ddp`, `fsdp2`, or a name as in accelerate_configs/deepspeed (zero2, zero3_offload_cpu, …); None where the
        process is alone and without an engine.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return "fsdp2"
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        return _launched_zero()
    return "ddp" if world_size() > 1 else None


def world_size() -> int:
    """The number of processes that train together; 1 where no launcher set WORLD_SIZE."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def sequence_parallel_size() -> int:
    """The number of processes that share one batch's tokens (Ulysses); 1 where accelerate's YAML says nothing."""
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return 1
    return int(os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1"))


def deepspeed_strategy(config: dict) -> str:
    """The strategy's name for a DeepSpeed configuration: zero2, zero3_offload_nvme, zero3_plus_plus, …"""
    zero = config.get("zero_optimization", {})
    name = f"zero{zero.get('stage', 0)}"
    if zero.get("zero_quantized_weights"):
        return f"{name}_plus_plus"
    device = zero.get("offload_optimizer", {}).get("device", "none")
    return name if device in ("none", None) else f"{name}_offload_{device}"


def split_strategy(strategy: str) -> tuple[str, str]:
    """A strategy's engine and where its optimizer states are: zero3_offload_cpu -> (zero3, cpu), tp8 -> (tp, none)."""
    if is_mesh(strategy):
        return "tp" if strategy.startswith("tp") else "hsdp", "none"
    engine, _, offload = strategy.partition("_offload_")
    return engine.removesuffix("_plus_plus"), offload or "none"


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


def _launched_zero() -> str:
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file not in ("none", "None", ""):
        return deepspeed_strategy(read_json(file))
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    device = os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
    return f"zero{stage}" + (f"_offload_{device}" if device in ("cpu", "nvme") else "")

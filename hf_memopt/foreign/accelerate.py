"""The engine that an accelerate YAML starts, as fields of ours; the rest of it memory does not see."""

from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, brief
from hf_memopt.foreign.values import AUTO
from hf_memopt.yaml_values import read_text, read_yaml


def engine_of_accelerate(path: Path) -> dict[str, Any]:
    """The processes and the engine of an accelerate YAML or JSON.

    Raises:
        InputError: it is none, or starts what is not modelled.
    """
    content = read_yaml(read_text(path, str(path)), str(path))
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise InputError(f"{path} is no configuration of accelerate")
    kind, processes = str(content["distributed_type"]), {"world_size": content.get("num_processes", 1)}
    if kind in ("NO", "MULTI_GPU"):
        return processes
    if kind == "DEEPSPEED":
        return processes | {"training.deepspeed": _deepspeed(content.get("deepspeed_config") or {})}
    if kind == "FSDP":
        settings = {key.removeprefix("fsdp_"): value for key, value in (content.get("fsdp_config") or {}).items()}
        if settings.pop("offload_params", False):
            raise InputError(f"{path}: weights that FSDP offloads to the CPU are not modelled; ZeRO-3 with offload is")
        if sharding := settings.pop("sharding_strategy", None):  # FSDP1's word for it
            settings["reshard_after_forward"] = str(sharding).lower()
        settings["version"] = settings.get("version", 1)
        return processes | {"training.fsdp": "full_shard auto_wrap", "training.fsdp_config": settings}
    raise InputError(f"{path}: distributed_type={brief(kind)} is not modelled")


def _deepspeed(settings: dict[str, Any]) -> Any:
    """The DeepSpeed settings that accelerate makes of its own keys (DeepSpeedPlugin.__post_init__)."""
    if file := settings.get("deepspeed_config_file"):
        return str(file)
    zero: dict[str, Any] = {"stage": int(settings.get("zero_stage", 2))}
    for part in ("optimizer", "param"):
        device = settings.get(f"offload_{part}_device") or "none"
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
    return {**AUTO, "zero_optimization": zero, "zero_allow_untested_optimizer": True}

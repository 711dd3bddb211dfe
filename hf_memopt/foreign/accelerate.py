"""The engine that an accelerate YAML starts, as fields of TrainingArguments; the rest of it memory does not see."""

from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, brief
from hf_memopt.yaml_values import read_text, read_yaml


def engine_of_accelerate(path: Path) -> dict[str, Any]:
    """num_processes, and the deepspeed or fsdp settings, of an accelerate YAML.

    Raises:
        InputError: it is none, or starts what is not modelled.
    """
    content = read_yaml(read_text(path, str(path)), str(path))
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise InputError(f"{path} is no configuration of accelerate")
    kind, processes = str(content["distributed_type"]), {"num_processes": content.get("num_processes", 1)}
    if kind in ("NO", "MULTI_GPU"):
        return processes
    if kind == "DEEPSPEED":
        return processes | {"deepspeed": _deepspeed(content.get("deepspeed_config") or {}, path)}
    if kind == "FSDP":
        settings = {key.removeprefix("fsdp_"): value for key, value in (content.get("fsdp_config") or {}).items()}
        return processes | {"fsdp": "full_shard auto_wrap", "fsdp_config": settings}
    raise InputError(f"{path}: distributed_type={brief(kind)} is not modelled")


def _deepspeed(settings: dict[str, Any], path: Path) -> Any:
    """The DeepSpeed settings that accelerate makes of its own keys (DeepSpeedPlugin.__post_init__)."""
    if file := settings.get("deepspeed_config_file"):
        return str(file)
    stage = int(settings.get("zero_stage", 2))
    zero: dict[str, Any] = {"stage": stage}
    for part in ("optimizer", "param"):
        device = settings.get(f"offload_{part}_device") or "none"
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    bf16 = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    return {"zero_optimization": zero, **dict.fromkeys(auto, "auto"), **bf16, "zero_allow_untested_optimizer": True}

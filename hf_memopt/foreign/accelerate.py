"""The engine that `accelerate launch` starts, by its file and its options, as fields of ours."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, brief
from hf_memopt.foreign.key_table import is_off
from hf_memopt.foreign.values import AUTO, fsdp_keys
from hf_memopt.yaml_values import read_text, read_yaml

# Options that say how processes find each other, what is saved, or what a Trainer's own arguments decide.
_NEUTRAL = re.compile(
    "compute_environment|quiet|debug|main_.*|machine_rank|num_machines|same_network|rdzv_.*|gpu_ids|log_dir|role|module|"
    "no_python|max_restarts|monitor_interval|num_cpu_threads_per_process|enable_cpu_affinity|distributed_type|multi_gpu|"
    "deepspeed_(?:multinode_launcher|hostfile|exclusion_filter|inclusion_filter)|zero3_.*|gradient_.*|mixed_precision|"
    "seq_parallel_communication_data_type|downcast_bf16|use_parallelism_config|parallelism_config_dp_shard_size|"
    "parallelism_config_.*(?<!_size)"
)
_ENGINE = re.compile("num_processes|use_deepspeed|use_fsdp|zero_stage|deepspeed_config_file|offload_.*|fsdp_.*")
_WHOLE = re.compile("parallelism_config_(?!dp_shard).*_size")  # of which 1 is none
# Processes that share the tokens of a sample, and the option of what they need.
_SHARING = {"parallelism_config_cp_size": "use_fsdp", "parallelism_config_sp_size": "use_deepspeed"}
_REFUSED = re.compile("(?:use_)?cpu|tpu.*|dynamo_.*|fp8_.*|(?:use_)?megatron_lm.*|mpirun_.*|vm|aws_.*")
FILES = ("config_file", "accelerate_config")  # options that name its file, TRL's own the second
# What a trainer has, too, is the trainer's.
_TRAINERS = re.compile("gradient_.*|fsdp_config|debug")
_OF_DEEPSPEED = (
    *("gradient_accumulation_steps", "gradient_clipping"),
    *("zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model"),
)
_INNER = {"deepspeed_config": "", "fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_"}


def is_launch_option(key: str) -> bool:
    """True if a key is one of accelerate launch's, which TRL's command passes on."""
    ours = any(names.fullmatch(key) for names in (_NEUTRAL, _ENGINE, _WHOLE, _REFUSED))
    return key in FILES or (ours and not _TRAINERS.fullmatch(key))


def launch_file(name: str) -> Path | None:
    """A file that TRL's command names by a word: zero2, fsdp1, … None where TRL is not installed, or has none."""
    found = find_spec("trl")
    places = found.submodule_search_locations if found else None
    paths = [Path(place) / "accelerate_configs" / f"{name}.yaml" for place in places or ()]
    return next((path for path in paths if name.isidentifier() and path.is_file()), None)


def engine_of_launch(path: Path | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The processes, the precision and the engine of accelerate launch.

    Args:
        path: of its YAML or JSON.
        options: of its command, which come before the file's.

    Raises:
        InputError: the file is none of accelerate's, or starts what is not modelled.
    """
    where = str(path) if path else "accelerate launch"
    settings = {**(_of_file(path) if path else {}), **options}
    for key, value in settings.items():
        off = is_off(value) or value in ("no", "NO") or (_WHOLE.fullmatch(key) and value == 1)
        shares = key in _SHARING and settings.get(_SHARING[key])
        if not off and not shares and not _NEUTRAL.fullmatch(key) and not _ENGINE.fullmatch(key):
            raise InputError(f"{where}: {key}={brief(value)} is not modelled")
    if (precision := settings.get("mixed_precision")) == "fp8":
        raise InputError(f"{where}: mixed_precision=fp8 is not modelled")
    engine = {"mixed_precision": precision}
    if processes := settings.get("num_processes"):
        engine["world_size"] = processes
    engine |= _shared(settings, where)
    if settings.get("use_deepspeed"):
        engine["training.deepspeed"] = _deepspeed(settings)
    elif settings.get("use_fsdp"):
        own = fsdp_keys(
            {key.removeprefix("fsdp_"): value for key, value in settings.items() if key.startswith("fsdp_")}
        )
        engine |= {"training.fsdp": "full_shard auto_wrap", "training.fsdp_config": {"version": 1, **own}}
    return engine


def _shared(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The processes that share a sample.

    Raises:
        InputError: sizes that accelerate refuses (1.15, ParallelismConfig._validate_accelerator).
    """
    key = next((key for key in _SHARING if not is_off(size := settings.get(key)) and size != 1), None)
    if key is None:
        return {}
    size, shards = settings[key], settings.get("parallelism_config_dp_shard_size", 1)
    processes, multiplied = settings.get("num_processes"), key == "parallelism_config_cp_size"
    numbers = isinstance(size, int) and isinstance(shards, int)
    if not numbers or (multiplied and processes and size * shards != processes):
        raise InputError(
            f"{where}: {key}={brief(size)} × parallelism_config_dp_shard_size={brief(shards)} is not num_processes"
            f"={brief(processes)}"
        )
    return {"sequence_parallel": size}


def _of_file(path: Path) -> dict[str, Any]:
    """The settings of accelerate's file, under the names of its options."""
    content = read_yaml(read_text(path, str(path)), str(path))
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise InputError(f"{path} is no configuration of accelerate")
    kind = str(content["distributed_type"])
    engine = {"DEEPSPEED": {"use_deepspeed": True}, "FSDP": {"use_fsdp": True}, "NO": {}, "MULTI_GPU": {}}.get(kind)
    if engine is None:
        raise InputError(f"{path}: distributed_type={brief(kind)} is not modelled")
    flat = {"num_processes": 1}
    for key, value in content.items():
        prefix = _INNER.get(key)
        if prefix is None:
            flat[key] = value
        elif value:
            flat |= {f"{prefix}{str(name).removeprefix(prefix)}": inner for name, inner in dict(value).items()}
    return flat | engine


def _deepspeed(settings: Mapping[str, Any]) -> Any:
    """The DeepSpeed settings that accelerate makes of its own keys (DeepSpeedPlugin.__post_init__).

    Raises:
        InputError: keys that accelerate refuses beside a file of DeepSpeed's (_deepspeed_config_checks).
    """
    if file := settings.get("deepspeed_config_file"):
        if twice := next((key for key in _OF_DEEPSPEED if settings.get(key) is not None), None):
            beside = f"{twice}={brief(settings[twice])} beside deepspeed_config_file"
            raise InputError(f"accelerate launch: {beside}: write it in that file alone")
        return str(file)
    zero: dict[str, Any] = {"stage": int(settings.get("zero_stage", 2))}
    for part in ("optimizer", "param"):
        device = settings.get(f"offload_{part}_device") or "none"
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
    # What launch exports; transformers refuses it where the Trainer's own differs.
    exported = {key: settings[key] for key in _OF_DEEPSPEED[:2] if settings.get(key) is not None}
    return {**AUTO, **exported, "zero_optimization": zero, "zero_allow_untested_optimizer": True}

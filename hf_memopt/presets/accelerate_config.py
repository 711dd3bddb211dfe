"""The accelerate configuration of a preset: a dict, and the text of files that are shipped and exported."""

import base64
import json
from collections.abc import Mapping
from typing import Any


def accelerate_config(preset, deepspeed_file: str) -> dict:
    """A Preset's keys and values, as `accelerate launch --config_file` reads them.

    Args:
        deepspeed_file: the DeepSpeed JSON: its path, which accelerate resolves against the working directory
            instead of the YAML's folder, or the JSON itself as `inline` writes it; "" without DeepSpeed.
    """
    engine, precision, shared = preset.engine, preset.precision, preset.sequence_parallel
    # Several CPU processes are started as MULTI_GPU with use_cpu: accelerate starts MULTI_CPU through mpirun only.
    config: dict = {"compute_environment": "LOCAL_MACHINE", "distributed_type": engine.distributed_type}
    if deepspeed_file:
        # No mixed_precision here: accelerate refuses it beside a JSON, which takes it from the Trainer ("auto").
        config["deepspeed_config"] = {
            "deepspeed_config_file": deepspeed_file,
            "zero3_init_flag": engine.shards_weights,
            "deepspeed_multinode_launcher": "standard",
        }
    else:
        config["mixed_precision"] = "no" if precision == "fp32" else precision
    if precision == "fp8":
        config["fp8_config"] = {"backend": "AO"}
    if engine.fsdp_version:
        # accelerate refuses the efficient loading together with torchao's fp8.
        config["fsdp_config"] = FSDP2 | ({"fsdp_cpu_ram_efficient_loading": False} if precision == "fp8" else {})
        config["fsdp_config"]["fsdp_offload_params"] = engine.offloads
    if shared > 1:
        config["parallelism_config"] = {
            f"parallelism_config_{name}": value
            for name, value in (
                ("dp_shard_size", preset.processes // shared),
                ("sp_size", shared),
                ("sp_backend", "deepspeed"),
                ("sp_seq_length_is_variable", True),
                ("sp_attn_implementation", "sdpa"),
            )
        }
    return config | {
        "num_machines": preset.machines,
        "num_processes": preset.processes,
        "use_cpu": preset.hardware.backend == "cpu",
    }


# Without fsdp_version accelerate runs FSDP1, and without a wrap policy it wraps nothing.
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_offload_params": False,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_activation_checkpointing": True,
}


def inline(deepspeed: Mapping[str, Any]) -> str:
    """A DeepSpeed configuration as one string, so that a YAML that holds it can be copied anywhere.

    accelerate takes base64 wherever it takes a path (`HfDeepSpeedConfig`, accelerate 1.15). Its readable fields
    (`zero_stage`, `offload_optimizer_device`, …) cannot say the same: bucket sizes would be DeepSpeed's
    defaults, which take gigabytes.
    """
    return base64.urlsafe_b64encode(json.dumps(deepspeed, separators=(",", ":")).encode()).decode()


def json_text(settings: dict) -> str:
    """Settings as JSON for a file."""
    return json.dumps(settings, indent=2, default=str) + "\n"


def yaml_text(config: dict, comment: str) -> str:
    """The configuration as YAML under a comment. The string NO stays quoted: bare, YAML reads it as false."""
    import yaml

    return f"# {comment}\n" + yaml.safe_dump(config, sort_keys=False)

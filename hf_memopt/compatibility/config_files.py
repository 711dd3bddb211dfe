"""Check an accelerate YAML or a DeepSpeed JSON for what their own loaders let pass: nested keys that nobody reads."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from hf_memopt.errors import InputError, as_input_error, one_line
from hf_memopt.files import read_json

# Sections of an accelerate YAML whose keys become launcher options, and the prefix that accelerate adds by itself.
# The other sections need their prefix written out (accelerate.commands.launch._validate_launch_command).
_AUTO_PREFIX = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
_SECTIONS = ("deepspeed_config", "parallelism_config", "megatron_lm_config", *_AUTO_PREFIX)
# Read by accelerate.utils.launch with getattr, though the launcher has no option of that name.
_READ_WITHOUT_OPTION = {"fsdp_ignored_modules"}
# Set beside a DeepSpeed JSON, these are refused when the Trainer builds its plugin (accelerate.utils.dataclasses).
_DECIDED_BY_JSON = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
}  # fmt: skip
_DEEPSPEED_TOP = {
    "zero_optimization", "bf16", "fp16", "aio", "optimizer", "scheduler", "gradient_accumulation_steps",
    "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu", "activation_checkpointing",
    "communication_data_type", "steps_per_print", "wall_clock_breakdown", "zero_force_ds_cpu_optimizer",
    "zero_allow_untested_optimizer", "flops_profiler", "torch_autocast", "compile",
}  # fmt: skip


def check_config_file(path: str | Path) -> str:
    """Check a file of either kind, by its ending.

    Returns:
        "accelerate" or "deepspeed".

    Raises:
        InputError: unreadable, an unknown key, or settings that exclude each other.
    """
    if Path(path).suffix == ".json":
        _check_deepspeed(Path(path))
        return "deepspeed"
    _check_accelerate(Path(path))
    return "accelerate"


def _check_accelerate(path: Path) -> None:
    import yaml
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    if not path.is_file():
        raise InputError(f"{path}: no such file (paths are relative to {Path.cwd()})")
    with as_input_error(str(path), Exception):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise InputError(f"{path}: holds no settings")
        load_config_from_file(str(path))
    options = {action.dest for action in launch_command_parser()._actions} | _READ_WITHOUT_OPTION
    for section in _SECTIONS:
        prefix = _AUTO_PREFIX.get(section, "")
        known = {option.removeprefix(prefix) for option in options if option.startswith(prefix)}
        given = {key: key.removeprefix(prefix) for key in content.get(section) or {}}
        _refuse_unknown(f"{path}: {section}", given, known)
    _check_engine(path, content)


def _check_engine(path: Path, content: dict) -> None:
    engine = content.get("deepspeed_config") or {}
    if "deepspeed_config_file" not in engine:
        return
    doubled = sorted(_DECIDED_BY_JSON & engine.keys()) + (["mixed_precision"] if "mixed_precision" in content else [])
    if doubled:
        raise InputError(f"{path}: {doubled[0]} beside deepspeed_config_file is refused by accelerate: remove it here")
    read_json(engine["deepspeed_config_file"])


def _check_deepspeed(path: Path) -> None:
    content = read_json(path)
    for key in content.keys() - _DEEPSPEED_TOP:
        close = difflib.get_close_matches(key, _DEEPSPEED_TOP, n=1, cutoff=0.8)
        if close:
            raise InputError(f"{path}: unknown key {key!r}, which DeepSpeed would ignore: did you mean {close[0]!r}?")
    try:
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
        from deepspeed.runtime.zero.offload_config import (
            DeepSpeedZeroOffloadOptimizerConfig,
            DeepSpeedZeroOffloadParamConfig,
        )
    except ImportError as error:
        raise InputError(
            f"{path}: checking it needs DeepSpeed, which cannot be used here: {one_line(error)}"
        ) from error
    zero = content.get("zero_optimization", {})
    for where, block, kind in (
        ("zero_optimization", zero, DeepSpeedZeroConfig),
        ("zero_optimization.offload_optimizer", zero.get("offload_optimizer"), DeepSpeedZeroOffloadOptimizerConfig),
        ("zero_optimization.offload_param", zero.get("offload_param"), DeepSpeedZeroOffloadParamConfig),
        ("bf16", content.get("bf16"), DeepSpeedBF16Config),
        ("fp16", content.get("fp16"), DeepSpeedFP16Config),
    ):
        fields = kind.model_fields
        known = {*fields, *(field.alias for field in fields.values() if field.alias)}
        _refuse_unknown(f"{path}: {where}", {key: key for key in block or {}}, known)


def _refuse_unknown(where: str, given: dict[str, str], known: Iterable[str]) -> None:
    """`given` maps each key as written to the key as looked up."""
    known = sorted(known)
    for written, looked_up in given.items():
        if looked_up in known:
            continue
        ending = [name for name in known if name.endswith(f"_{looked_up}")]
        close = ending or difflib.get_close_matches(looked_up, known, n=1, cutoff=0.5)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise InputError(f"{where} has an unknown key {written!r}, which would be ignored{hint}")

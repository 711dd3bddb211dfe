"""Check an accelerate YAML or a DeepSpeed JSON for what their own loaders let pass: nested keys that nobody reads."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_memopt.engines.deepspeed import decode_inline, missing_batch_size
from hf_memopt.engines.deepspeed_values import Found, block_classes, wrong_values
from hf_memopt.errors import InputError, brief, closest, one_line
from hf_memopt.field_values import fit, hints_of
from hf_memopt.files import read_json
from hf_memopt.yaml_values import read_text, read_yaml

# Sections of an accelerate YAML whose keys become launcher options, and the prefix that accelerate adds by itself.
# The other sections need their prefix written out (accelerate.commands.launch._validate_launch_command).
_AUTO_PREFIX = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
# Older names that accelerate still turns into the newer ones (accelerate.commands.config.config_args.process_config).
_OLD_KEYS = {"fp16", "dynamo_backend"}
_SECTIONS = ("deepspeed_config", "parallelism_config", "megatron_lm_config", *_AUTO_PREFIX)
# Read by accelerate.utils.launch with getattr, though the launcher has no option of that name.
_READ_WITHOUT_OPTION = {"fsdp_ignored_modules"}
# `accelerate config` writes these (commands.config.cluster), and the launcher passes them on under names that nobody
# reads: as written -> as accelerate.utils.dataclasses reads them (1.15).
_MISNAMED_BY_ACCELERATE = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}
# Set beside a DeepSpeed JSON, these are refused when the Trainer builds its plugin (accelerate.utils.dataclasses).
_DECIDED_BY_JSON = {
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
}
_ENDINGS = (".yaml", ".yml", ".json")
_NEITHER = (
    "is neither an accelerate configuration (.yaml) nor a DeepSpeed configuration (.json), the files that are checked"
)
_FSDP_ON_CPU = "accelerate starts no FSDP on a CPU, and trains under DDP without saying so"
_DEEPSPEED_TOP = {
    "zero_optimization",
    "bf16",
    "fp16",
    "aio",
    "optimizer",
    "scheduler",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "activation_checkpointing",
    "communication_data_type",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_force_ds_cpu_optimizer",
    "zero_allow_untested_optimizer",
    "flops_profiler",
    "torch_autocast",
    "compile",
}


@dataclass(frozen=True)
class Fault:
    """What is wrong in a file.

    Attributes:
        line: counted from 1; None where it is of the whole file.
        text: names the key, its value and what to do.
    """

    path: Path
    line: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.path}: line {self.line}: {self.text}" if self.line else f"{self.path}: {self.text}"


def check_config_file(path: str | Path) -> str:
    """Check a file of either kind, by its ending.

    Returns:
        "accelerate" or "deepspeed".

    Raises:
        InputError: unreadable, an unknown key, or settings that exclude each other: the first of them.
    """
    path = Path(path)
    faults = find_faults(path)
    if faults:
        more = f" ({len(faults) - 1} more: hf-memopt doctor {path})" if len(faults) > 1 else ""
        raise InputError(f"{faults[0]}{more}")
    return kind_of(path)


def kind_of(path: str | Path) -> str:
    """Return whose file it is, accelerate or deepspeed: accelerate writes and reads JSON as well."""
    if Path(path).suffix != ".json":
        return "accelerate"
    try:
        content = _parsed_json(read_text(path, ""))
    except InputError:
        return "deepspeed"
    # accelerate's own loader refuses a file without it (config_args.process_config); no key of DeepSpeed is named so.
    return "accelerate" if isinstance(content, dict) and "distributed_type" in content else "deepspeed"


def find_faults(path: str | Path) -> list[Fault]:
    """All that is wrong in a file, in the order of its lines; what is wrong with all of it comes last."""
    path = Path(path)
    try:
        text = read_text(path, "")
        content = _parsed_json(text) if path.suffix == ".json" else read_yaml(text, "")
    except InputError as error:
        return [Fault(path, None, str(error).removeprefix(": ") if _by_its_ending(path) else _NEITHER)]
    if not isinstance(content, dict):
        return [Fault(path, None, f"holds no settings, but {brief(content)}" if _by_its_ending(path) else _NEITHER)]
    lines = _Lines(text)
    find = _deepspeed_faults if kind_of(path) == "deepspeed" else _accelerate_faults
    faults = [Fault(path, lines.line_of(keys), said) for keys, said in find(path, content)]
    return sorted(faults, key=lambda fault: fault.line or math.inf)  # of the whole file: last


def _by_its_ending(path: Path) -> bool:
    """Whether a file may be a configuration; one that cannot be read at all says so itself."""
    return path.suffix.lower() in _ENDINGS or not path.is_file()


def difference_here(path: str | Path) -> str | None:
    """What a valid file does on this machine instead of what it says; None where it does as it says."""
    import torch

    if kind_of(path) == "deepspeed":
        return None
    content = read_yaml(read_text(Path(path), ""), "")
    block = content.get("fp8_config") or {}
    if misnamed := [name for name in block if name.removeprefix("fp8_") in _MISNAMED_BY_ACCELERATE]:
        read = " and ".join(_MISNAMED_BY_ACCELERATE[name.removeprefix("fp8_")] for name in misnamed)
        return f"accelerate config writes {' and '.join(misnamed)} in fp8_config, and accelerate reads {read}: rename"
    if content.get("distributed_type") != "FSDP" or torch.accelerator.is_available():
        return None
    return f"on this machine, which has no accelerator, {_FSDP_ON_CPU}"


def _parsed_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not readable as JSON: {one_line(error)}") from error


class _Lines:
    """The lines that the keys of a YAML or JSON text stand on."""

    def __init__(self, text: str) -> None:
        import yaml

        try:
            self._root = yaml.compose(text.replace("\t", " "))  # JSON may be indented by tabs, YAML may not
        except yaml.YAMLError:
            self._root = None

    def line_of(self, keys: tuple[str, ...]) -> int | None:
        """The line of a key within keys; None where it is not in the text."""
        import yaml

        node, line = self._root, None
        for key in keys:
            found = (
                next((pair for pair in node.value if pair[0].value == key), None)
                if isinstance(node, yaml.MappingNode)
                else None
            )
            if found is None:
                return line
            line, node = found[0].start_mark.line + 1, found[1]
        return line


def _accelerate_faults(path: Path, content: dict[str, Any]) -> Found:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    sagemaker = content.get("compute_environment") == "AMAZON_SAGEMAKER"
    hints = hints_of(SageMakerConfig if sagemaker else ClusterConfig)
    found = list(_unknown_keys((), dict(zip(content, content, strict=True)), {*hints, *_OLD_KEYS}))
    actions = launch_command_parser()._actions
    written = {
        name: value for name, value in content.items() if not (value is None or _unread_answer(name, value, actions))
    }
    found += _wrong_values(written, hints)
    found += _wrong_names(content, sagemaker)
    options = {action.dest for action in actions} | _READ_WITHOUT_OPTION
    for section in _SECTIONS:
        prefix = _AUTO_PREFIX.get(section, "")
        known = {option.removeprefix(prefix) for option in options if option.startswith(prefix)}
        known |= _MISNAMED_BY_ACCELERATE.keys() if section == "fp8_config" else set()
        block = content.get(section) or {}
        if isinstance(block, dict):  # anything else is a wrong value
            found += _unknown_keys((section,), {key: str(key).removeprefix(prefix) for key in block}, known)
    if isinstance(content.get("deepspeed_config") or {}, dict):
        found += _engine_faults(content)
    if content.get("distributed_type") == "FSDP" and content.get("use_cpu") is True:
        found.append(
            (
                ("use_cpu",),
                f"use_cpu=true beside distributed_type=FSDP: {_FSDP_ON_CPU}; set distributed_type "
                "to MULTI_GPU for DDP, or to DEEPSPEED",
            )
        )
    yield from found
    if not found:
        try:
            load_config_from_file(str(path))
        except Exception as error:  # accelerate's classes raise what their enums and constructors raise
            yield (), one_line(error)


def _unread_answer(name: str, value: Any, actions: list) -> bool:
    """True for a yes or no that accelerate neither wants as a truth value nor reads.

    `accelerate config` writes some answers as they were typed (downcast_bf16, tpu_use_sudo). The launcher takes from a
    file only options that are None without it (_validate_launch_command); where it takes one, "no" counts as true.
    """
    from accelerate.commands.config.config_utils import _convert_yes_no_to_bool

    if [action.default for action in actions if action.dest == name] != [False]:
        return False
    try:
        _convert_yes_no_to_bool(value)
    except (KeyError, AttributeError):  # another text; no text
        return False
    return True


def _wrong_values(content: dict[str, Any], hints: dict[str, Any]) -> Found:
    for name, value in content.items():
        try:
            fit(hints, {name: value})
        except InputError as error:
            yield (name,), str(error)


def _wrong_names(content: dict[str, Any], sagemaker: bool) -> Found:
    """Names that accelerate's enums lack: its own error names neither the key nor the valid values."""
    from accelerate.utils.dataclasses import (
        ComputeEnvironment,
        DistributedType,
        PrecisionType,
        SageMakerDistributedType,
    )

    kinds = {
        "compute_environment": ComputeEnvironment,
        "distributed_type": SageMakerDistributedType if sagemaker else DistributedType,
        "mixed_precision": PrecisionType,
    }
    for name, kind in kinds.items():
        value, known = content.get(name), [str(item.value) for item in kind]
        # The launcher reads the precision in lower case (accelerate.utils.launch); another type is a wrong value.
        if not isinstance(value, str) or value in known or (kind is PrecisionType and value.lower() in known):
            continue
        close = closest(value, known)
        hint = f"did you mean {close!r}? " if close else ""
        yield (name,), f"{name}={brief(value)} is unknown: {hint}valid are {', '.join(known)}"


def _engine_faults(content: dict[str, Any]) -> Found:
    engine = content.get("deepspeed_config") or {}
    if "deepspeed_config_file" not in engine:
        return
    for name in sorted(_DECIDED_BY_JSON & engine.keys()):
        yield (
            ("deepspeed_config", name),
            f"{name} beside deepspeed_config_file is refused by accelerate: remove it here",
        )
    if "mixed_precision" in content:
        yield ("mixed_precision",), "mixed_precision beside deepspeed_config_file is refused by accelerate: remove it"
    place, given = ("deepspeed_config", "deepspeed_config_file"), str(engine["deepspeed_config_file"])
    if (inline := decode_inline(given)) is not None:
        for _, said in _deepspeed_faults(Path(), inline):
            yield place, f"in the JSON that deepspeed_config_file holds: {said}"
        return
    try:
        read_json(given)
    except InputError as error:
        yield place, str(error)


def _deepspeed_faults(path: Path, content: dict[str, Any]) -> Found:
    for key in content.keys() - _DEEPSPEED_TOP:
        # Below 0.8 it may be a key of a newer DeepSpeed, or one of a user's own, which are ignored on purpose.
        if close := closest(key, _DEEPSPEED_TOP, cutoff=0.8):
            yield (key,), f"unknown key {key!r}, which DeepSpeed would ignore: did you mean {close!r}?"
    if reason := missing_batch_size(content):
        yield (), reason
    try:
        classes = block_classes()
    except ImportError as error:
        yield (), f"checking it needs DeepSpeed, which cannot be used here: {one_line(error)}"
        classes = {}
    for keys, kind in classes.items():
        block: Any = content
        for key in keys:
            block = block.get(key) if isinstance(block, dict) else None
        if isinstance(block, dict):
            known = {*kind.model_fields, *(field.alias for field in kind.model_fields.values() if field.alias)}
            yield from _unknown_keys(keys, {key: key for key in block}, known)
    yield from wrong_values(content)


def _unknown_keys(keys: tuple[str, ...], given: dict[Any, str], known: Iterable[str]) -> Found:
    """Keys that nobody reads.

    Args:
        keys: that lead to them.
        given: maps each key as written to the key as looked up.
    """
    known = sorted(known)
    for written, looked_up in given.items():
        if looked_up in known:
            continue
        ending = next((name for name in known if name.endswith(f"_{looked_up}")), None)
        close = ending or closest(looked_up, known)
        if close and (prefix := str(written).removesuffix(looked_up)):
            close = prefix + close
        hint = f": did you mean {close!r}?" if close else ""
        where = f"{'.'.join(keys)} has an unknown key" if keys else "unknown key"
        yield (*keys, written), f"{where} {brief(written)}, which would be ignored{hint}"

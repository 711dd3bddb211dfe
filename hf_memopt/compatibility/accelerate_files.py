"""What there is to say of an accelerate YAML: what accelerate refuses, and what nobody reads."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hf_memopt.compatibility.accelerate_notes import FSDP_ON_CPU, MISNAMED, notes
from hf_memopt.compatibility.asked_accelerate import Answer, ask
from hf_memopt.compatibility.deepspeed_files import examine_deepspeed
from hf_memopt.engines.deepspeed import decode_inline
from hf_memopt.engines.deepspeed_values import homes, keys_read, refusals
from hf_memopt.errors import InputError, brief, misspelling, one_line
from hf_memopt.field_values import fit, hints_of
from hf_memopt.files import read_json
from hf_memopt.findings import Effect, Finding, Keys, places, refused, value_at, without

# Sections of an accelerate YAML whose keys become launcher options, and the prefix that accelerate adds by itself.
# The other sections need their prefix written out (accelerate.commands.launch._validate_launch_command).
_AUTO_PREFIX = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
# Older names that accelerate still turns into the newer ones (accelerate.commands.config.config_args.process_config).
_OLD_KEYS = {"fp16", "dynamo_backend"}
_SECTIONS = ("deepspeed_config", "parallelism_config", "megatron_lm_config", *_AUTO_PREFIX)
# Read by accelerate.utils.launch with getattr, though the launcher has no option of that name.
_READ_WITHOUT_OPTION = {"fsdp_ignored_modules"}
# Set beside a DeepSpeed JSON, these are refused (accelerate.utils.dataclasses.DeepSpeedPlugin).
_DECIDED_BY_JSON = {
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model"),
    *("offload_optimizer_device", "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path"),
}
_LAST = ("num_processes", "compute_environment", "distributed_type")  # without them a file means something else
_MOST = 8  # refusals of one file


def examine_accelerate(content: Mapping[str, Any]) -> Iterator[Finding]:
    """What is found in the file's content."""
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
    from accelerate.commands.launch import launch_command_parser

    sagemaker = content.get("compute_environment") == "AMAZON_SAGEMAKER"
    hints, actions = hints_of(SageMakerConfig if sagemaker else ClusterConfig), launch_command_parser()._actions
    known = sorted({*hints, *_OLD_KEYS})
    if content.keys().isdisjoint(known):
        yield Finding((), "sets nothing that accelerate knows: it is no configuration of accelerate")
        return
    written = {name: value for name, value in content.items() if not _unread_answer(name, value, actions)}
    mistyped = dict(_wrong_types(written, hints))
    found = [
        Finding((key,), f"unknown key {brief(key)}, which accelerate refuses{_did_you_mean(misspelling(key, known))}")
        for key in content.keys() - set(known)
    ]
    found += _unread_keys(content, {action.dest for action in actions} | _READ_WITHOUT_OPTION)
    found += _of_json(content)
    choices = {action.dest: action.choices for action in actions if action.choices} | _names(sagemaker)
    rest = _remaining(content, found)
    for _ in range(_MOST):
        answer = ask(rest)
        findings = list(_translated(rest, answer, choices, mistyped))
        found += findings
        if not refused(findings):
            break
        rest = _remaining(rest, findings)
    yield from found
    for name in mistyped.keys() - {keys[0] for keys, *_ in found if len(keys) == 1}:
        yield Finding((name,), mistyped[name], Effect.ACCEPTED)
    if content.get("distributed_type") == "FSDP" and content.get("use_cpu") is True:
        text = f"use_cpu=true beside distributed_type=FSDP: {FSDP_ON_CPU}; set distributed_type to MULTI_GPU for DDP"
        yield Finding(("use_cpu",), f"{text}, or to DEEPSPEED", Effect.ACCEPTED)
    yield from notes(content, answer)


def _remaining(content: Mapping[str, Any], found: Iterable[Finding]) -> dict[str, Any]:
    """The content without what was found, still an accelerate file."""
    # Sizes of parallelism_config multiply: without one of them the others are refused.
    block = ("parallelism_config",)
    rest = without(content, [block if keys[:1] == block else keys for keys in refused(found)])
    return {"distributed_type": "NO", **rest} if "distributed_type" in content else rest


def _unread_answer(name: str, value: Any, actions: list) -> bool:
    """True for a yes or no that accelerate neither wants as a truth value nor reads, and for nothing at all.

    `accelerate config` writes some answers as they were typed (downcast_bf16, tpu_use_sudo). The launcher takes from a
    file only options that are None without it (_validate_launch_command); where it takes one, "no" counts as true.
    """
    from accelerate.commands.config.config_utils import _convert_yes_no_to_bool

    if value is None:
        return True
    if [action.default for action in actions if action.dest == name] != [False]:
        return False
    try:
        _convert_yes_no_to_bool(value)
    except (KeyError, AttributeError):  # another text; no text
        return False
    return True


def _wrong_types(content: Mapping[str, Any], hints: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        try:
            fit(hints, {name: value})
        except InputError as error:
            yield name, str(error)


def _did_you_mean(close: str | None) -> str:
    return f": did you mean {close!r}?" if close else ""


def _names(sagemaker: bool) -> dict[str, list[str]]:
    """The values of accelerate's enums, whose own error names neither the key nor the others."""
    from accelerate.utils import dataclasses as kinds

    enums: dict[str, Any] = {
        "compute_environment": kinds.ComputeEnvironment,
        "distributed_type": kinds.SageMakerDistributedType if sagemaker else kinds.DistributedType,
        "mixed_precision": kinds.PrecisionType,
    }
    return {name: [str(item.value) for item in enum] for name, enum in enums.items()}


def _unread_keys(content: Mapping[str, Any], options: set[str]) -> Iterator[Finding]:
    """Keys of sections that become no option of the launcher."""
    for section in _SECTIONS:
        prefix, block = _AUTO_PREFIX.get(section, ""), content.get(section)
        known = sorted(option.removeprefix(prefix) for option in options if option.startswith(prefix))
        known += MISNAMED if section == "fp8_config" else ()
        for key in block if isinstance(block, Mapping) else ():
            looked_up = str(key).removeprefix(prefix)
            if looked_up in known:
                continue
            ending = next((name for name in known if name.endswith(f"_{looked_up}")), None)
            if (close := ending or misspelling(looked_up, known)) and str(key) != looked_up:
                close = prefix + close
            hint = _did_you_mean(close) or _of_deepspeed(section, key)
            text = f"{section} has an unknown key {brief(key)}, which would be ignored{hint}"
            yield Finding((section, key), text, Effect.ACCEPTED)


def _of_deepspeed(section: str, key: Any) -> str:
    """Where a key of a DeepSpeed JSON belongs."""
    if section != "deepspeed_config":
        return ""
    try:
        top = (key,) in keys_read()
        place = "at the top" if top else f"in {'.'.join(homes()[key])}" if key in homes() else ""
    except ImportError:
        return ""
    return f": it belongs {place} of a JSON, which deepspeed_config_file names" if place else ""


def _of_json(content: Mapping[str, Any]) -> Iterator[Finding]:
    """What is wrong with the DeepSpeed JSON of a YAML, and beside it."""
    engine = content.get("deepspeed_config")
    if not isinstance(engine, Mapping) or "deepspeed_config_file" not in engine:
        return
    beside = [("deepspeed_config", name) for name in engine if name in _DECIDED_BY_JSON]
    for keys in [*beside, *([("mixed_precision",)] if "mixed_precision" in content else [])]:
        yield Finding(keys, f"{keys[-1]} beside deepspeed_config_file is refused by accelerate: remove it here")
    place, given = ("deepspeed_config", "deepspeed_config_file"), str(engine["deepspeed_config_file"])
    held = decode_inline(given)
    try:
        config = read_json(given) if held is None else held
    except InputError as error:
        yield Finding(place, str(error))
        return
    where = f"in {given}" if held is None else "in the JSON that deepspeed_config_file holds"
    for _, text, effect in examine_deepspeed(config):
        yield Finding(place, f"{where}: {text}", effect)


def _translated(content: Mapping[str, Any], answer: Answer, choices: Mapping, mistyped: Mapping) -> Iterator[Finding]:
    """accelerate's refusal, or DeepSpeed's of what accelerate hands on, at the key of the file that is at fault."""
    if answer.error is not None:
        keys = _place_of(content, answer.error)
        text = mistyped.get(keys[0]) if len(keys) == 1 else None
        yield Finding(keys, text or _said(content, keys, answer.error, choices))
        return
    block = content.get("deepspeed_config") or {}
    if answer.deepspeed is None or "deepspeed_config_file" in block:
        return
    for finding in refusals(answer.deepspeed):
        ending = "_".join(finding.keys[1:] or finding.keys)
        names = [name for name in block if ending and str(name).endswith(ending)]
        keys = ("deepspeed_config", names[0]) if names else ()
        text = f"{'.'.join(keys)}={brief(value_at(content, keys))}: DeepSpeed refuses it as {finding.text}"
        yield Finding(keys, text if keys else finding.text)


def _place_of(content: Mapping[str, Any], error: Exception) -> Keys:
    """The key without which accelerate says something else; those that its text names are tried first."""
    words = set(re.findall(r"[\w.]+", str(error).lower()))

    def order(place: tuple[Keys, Any]) -> tuple:
        keys, value = place
        prefix = f"{keys[0]}_" if keys[0] == "parallelism_config" else _AUTO_PREFIX.get(keys[0], "")
        name = str(keys[-1]).lower()
        late = _LAST.index(keys[0]) + 1 if keys[0] in _LAST else 0
        valued = isinstance(value, str) and value.lower() in words
        named = {name, name.removeprefix(prefix)} & words or ("mesh" in words and keys[0] == "parallelism_config")
        return late, not valued, not named

    for keys, value in sorted(places(content), key=order):
        if isinstance(value, Mapping):
            continue
        other = ask(_remaining(content, [Finding(keys, "")])).error
        if other is None or str(other) != str(error):
            return keys
    return ()


def _said(content: Mapping[str, Any], keys: Keys, error: Exception, choices: Mapping[str, Any]) -> str:
    """A refusal of one value, with what to write instead."""
    from accelerate.utils import constants

    if not keys:
        return one_line(error)
    place, value, prefix = ".".join(map(str, keys)), value_at(content, keys), _AUTO_PREFIX.get(keys[0], "")
    option = prefix + str(keys[-1]).removeprefix(prefix)
    known = [str(name) for name in getattr(constants, option.upper(), choices.get(option, ()))]
    if known and str(value).upper() not in (name.upper() for name in known):
        close = misspelling(str(value), known)
        hint = f"did you mean {close!r}? " if close else ""
        return f"{place}={brief(value)} is unknown: {hint}valid are {', '.join(known)}"
    if str(error).startswith("invalid truth value"):
        return f"{place}={brief(value)} must be true or false"
    refusal = isinstance(error, ValueError | NotImplementedError | RuntimeError)
    said = f"accelerate {'refuses it' if refusal else f'cannot read it: {type(error).__name__}'}: {one_line(error)}"
    return f"{place}={brief(value)}: {said}{_quoting(content, keys, value)}"


def _quoting(content: Mapping[str, Any], keys: Keys, value: Any) -> str:
    """Whether accelerate takes the value with quotes, or without."""
    import yaml

    other = yaml.safe_load(value) if isinstance(value, str) else str(value)
    if type(other) is type(value) or isinstance(value, bool | list | dict | None):
        return ""
    changed = without(content, ())
    value_at(changed, keys[:-1])[keys[-1]] = other
    how = "without" if isinstance(value, str) else "in"
    return "" if ask(changed).error else f": write it {how} quotes"

"""The settings of `--set KEY=VALUE`: fields of Hugging Face's configurations, and the few of this project's."""

import re
from typing import Any

from hf_memopt.errors import InputError, accepted, brief
from hf_memopt.field_values import fit, hints_of
from hf_memopt.hardware.attention_kernels import FLASH
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.presets import DTYPES
from hf_memopt.presets.quantization_fields import check_quantization
from hf_memopt.yaml_values import module_names, read_yaml

_PREFIXES = ("lora", "quantization", "model")
_ATTENTION = ("eager", "sdpa", "flex_attention", *FLASH)
_OWN = {
    "dtype": str,
    "attn_implementation": str | None,
    "task": str | None,
    "kbit_preparation": bool,
    "padded": bool,
    "packed": bool,
}
_CLIPS = {
    "images": int,
    "image_size": str,
    "max_frames": int,
    "frame_size": str,
    "max_pixels_per_frame": int | None,
    "answer_tokens": int,
    "freeze_vision": bool,
    "freeze_projector": bool,
}


def command_spec(settings: list[str] | None = None, **options: Any) -> JobSpec:
    """The job of a command line: its options, fields of JobSpec, and its `--set`.

    Raises:
        InputError: a setting that cannot be used, or one that says otherwise what an option says.
    """
    parsed = parse_settings(settings or [])
    task, training = parsed.pop("task", None), parsed["training"]
    if task and options.get("task") not in (None, task):
        raise InputError(f"--task {options['task']} and --set task={task}: leave one of the two out")
    options["task"] = options.get("task") or task
    strategy = options.get("strategy")
    for name in ("deepspeed", "fsdp"):
        if strategy and training.get(name) and (name, strategy) != ("fsdp", "fsdp2"):
            value = brief(training[name])
            raise InputError(f"--strategy {strategy} and --set {name}={value}: leave one of the two out")
    if parsed["memory_args"].adam_mini and "optim" in training:
        raise InputError(f"adam_mini replaces the optimizer, and optim={training['optim']}: leave one of the two out")
    return JobSpec(**options, **parsed)


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """KEY=VALUE settings as fields of JobSpec, checked.

    Raises:
        InputError: one that is not written so, an unknown prefix, or a value that its field does not take.
    """
    groups: dict[str, dict[str, Any]] = {name: {} for name in ("", *_PREFIXES, "own", "memory", "clips")}
    by_group = {"own": _OWN, "memory": MemoryArguments.names(), "clips": _CLIPS}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting}: write it as KEY=VALUE")
        key = "_".join(re.split(r"[\s-]+", key.strip().lower()))
        prefix, dot, name = key.partition(".")
        if dot and prefix not in _PREFIXES:
            raise InputError(f"--set {setting}: only lora., quantization. and model. have keys of their own")
        group = prefix if dot else next((group for group, keys in by_group.items() if key in keys), "")
        if re.fullmatch(r"0\d+|\d+(:\d+)+", text.strip()):
            raise InputError(f"--set {setting}: YAML reads {text} in base 8 or 60; write a plain number")
        value, place = read_yaml(text, f"--set {key}"), name if dot else key
        value = module_names(value) if place.endswith("modules") else value
        if groups[group].setdefault(place, value) != value:
            raise InputError(f"--set {setting}: {key} is {brief(groups[group][place])} already; set it once")
    own = fit(_OWN, groups["own"], "--set ")
    if own.get("dtype") is not None:
        own["dtype"] = accepted("dtype", own["dtype"], (*DTYPES, "auto"))
    attention = own.get("attn_implementation")
    if attention and not re.search("[/|]", attention):  # kernels of the hub, and paged forms
        own["attn_implementation"] = accepted("attn_implementation", attention, _ATTENTION)
    return {
        "training": groups[""],
        "lora": groups["lora"],
        "quantization": check_quantization(groups["quantization"]),
        "sizes": groups["model"],
        "memory_args": MemoryArguments(**fit(hints_of(MemoryArguments), groups["memory"], "--set ")),
        "named": frozenset(groups["memory"]),
        "clips": fit(_CLIPS, groups["clips"], "--set "),
        **own,
    }

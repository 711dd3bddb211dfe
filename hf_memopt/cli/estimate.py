"""`hf-memopt estimate`: will it fit, before anything runs."""

from dataclasses import replace
from typing import Any

import yaml

from hf_memopt.cli.output import print_json, print_table
from hf_memopt.errors import InputError, choose
from hf_memopt.hardware.catalog import gib
from hf_memopt.presets import DTYPES, Preset, get_preset

_OWN = ("dtype", "attn_implementation")


def run_estimate(model, preset_name, method, seq_len, hardware, settings, as_json) -> int:
    """Print the estimate; 0 if it fits or cannot be told, 1 if it does not fit."""
    from hf_memopt.estimator import estimate
    from hf_memopt.hardware import get_hardware
    from hf_memopt.presets.arguments import resolve

    preset = get_preset(preset_name, method)
    if method == "qlora" or preset.processes > 1:
        what = "4-bit weights are" if method == "qlora" else f"{preset.processes} devices are"
        raise InputError(f"{what} not modelled yet: estimate method full or lora on one device")
    fields, lora, own = _split(settings)
    preset = replace(preset, dtype=own.get("dtype", preset.dtype))
    length = seq_len or preset.seq_len
    device = get_hardware(hardware) if hardware else preset.hardware
    resolved = resolve(preset, preset.processes, fields)
    peft_config = preset.peft_config(**lora)
    found = estimate(model, resolved, length, device, peft_config, preset.dtype, own.get("attn_implementation"))
    if as_json:
        print_json(found.to_dict())
    else:
        _print(model, preset, length, device, found)
    return 1 if found.fits is False else 0


def _split(settings: list[str]) -> tuple[dict, dict, dict]:
    """KEY=VALUE words into TrainingArguments fields, LoraConfig fields and what is neither."""
    fields: dict[str, Any] = {}
    lora: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for word in settings:
        key, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"--set {word}: write it as KEY=VALUE")
        value = yaml.safe_load(text)
        if key.startswith("lora."):
            lora[key.removeprefix("lora.")] = value
        elif key in _OWN:
            own[key] = value
        else:
            fields[key] = value
    if "dtype" in own and own["dtype"] not in DTYPES:
        raise choose("dtype", str(own["dtype"]), DTYPES)
    return fields, lora, own


def _print(model, preset: Preset, length: int, device, found) -> None:
    verdict = {True: "fits", False: "does not fit", None: "capacity unknown"}[found.fits]
    print(
        f"{model}, {preset.method}, {found.training_arguments['per_device_train_batch_size']} × {length} tokens "
        f"on {device.label}: {gib(found.peak_allocated_bytes)} of {gib(found.capacity_bytes)} predicted, {verdict}"
    )
    print_table(
        f"at the peak, in {found.phase}", ("what", "predicted"),
        [(kind.replace("_", " "), gib(size)) for kind, size in found.breakdown.items() if size],
    )  # fmt: skip
    for note in found.notes:
        print(f"note: {note}")

"""`hf-memopt presets` and `hf-memopt show`."""

from dataclasses import asdict, fields
from typing import Any

from hf_memopt.cli.answer_printed import paragraph
from hf_memopt.cli.output import print_json, print_table
from hf_memopt.hardware.catalog import Hardware
from hf_memopt.presets import Preset, list_presets, preset_by_name
from hf_memopt.presets.reference import largest_model, reference_estimate, summarize
from hf_memopt.presets.tier_file import summarize as summarize_clips
from hf_memopt.presets.tier_file import tiers_of
from hf_memopt.presets.trl_configs import DEFAULTS
from hf_memopt.stack.vocabulary import written
from hf_memopt.terminal import say
from hf_memopt.units import gib


def list_all(method: str, as_json: bool) -> None:
    """All presets for a method."""
    presets = [preset_by_name(name, method) for name in list_presets()]
    if as_json:
        print_json({"presets": [_summary(preset) for preset in presets]})
        return
    rows = [
        (
            preset.name,
            f"{preset.micro_batch_size}×{preset.gradient_accumulation_steps}×{preset.processes}"
            f" = {preset.effective_batch_size}",
            preset.seq_len,
            preset.reference_model.rpartition("/")[2],
            (largest_model(preset) or "").rpartition("/")[2],
        )
        for preset in presets
    ]
    columns = ("preset", "micro-batch × accumulation × devices", "tokens", "largest model", "at micro-batch 1")
    print_table(f"presets, method {method}", columns, rows)
    print("`hf-memopt show PRESET` shows one, `hf-memopt export PRESET DIR` writes its files.")


def show_one(name: str, method: str, strategy: str | None, precision: str | None, as_json: bool) -> None:
    """One preset in full."""
    preset = preset_by_name(name, method, strategy, precision)
    if as_json:
        print_json(describe(preset))
        return
    about = f"{preset.name}, method {preset.method}, strategy {preset.strategy}: {preset.meant_for}"
    say("\n".join([*paragraph(about), ""]))
    estimated, largest = reference_estimate(preset), largest_model(preset)
    lora = preset.lora() if method != "full" else {}
    quantization = preset.quantization() if method == "qlora" else {}
    rows = [
        *written(preset.settings()).items(),
        ("dtype (model)", preset.dtype),
        ("tokens per sample", preset.seq_len),
        ("effective batch", preset.effective_batch_size),
        ("reference model", preset.reference_model),
        *([("its memory", summarize(estimated))] if estimated else []),
        *([("largest, at micro-batch 1", largest)] if largest else []),
        *((f"video frames, {model}", summarize_clips(row)) for model, row in tiers_of(preset).items()),
        *((f"${key}", value) for key, value in preset.environment.items()),
        *((f"lora.{key}", value) for key, value in lora.items()),
        *((f"quantization.{key}", value) for key, value in quantization.items()),
    ]
    print_table("settings", ("setting", "value"), rows)
    figures = (
        (name.replace("_", " "), _figure(name, getattr(preset.hardware, name)), source)
        for name, source in preset.hardware.sources.items()
    )
    print_table("hardware", ("figure", "value", "source"), figures)
    rows = [(default.field, str(default.value), " ".join(default.classes), default.effect) for default in DEFAULTS]
    title = "training_arguments(config_class=…): TRL's own defaults that decide memory"
    print_table(title, ("field", "TRL 1.16", "classes", "effect; what the preset sets"), rows, frame=False)


def describe(preset: Preset) -> dict[str, Any]:
    """A preset as one JSON object."""
    return {
        **_summary(preset),
        "meant_for": preset.meant_for,
        "training_arguments": written(preset.settings()),
        "model_kwargs": {"dtype": preset.dtype},
        "quantization": preset.quantization() if preset.method == "qlora" else None,
        "lora": preset.lora() if preset.method != "full" else None,
        "accelerate_config": preset.accelerate_config(),
        "deepspeed_config": preset.deepspeed_config(),
        "environment": dict(preset.environment),
        "reference_estimate": reference_estimate(preset),
        "video_tiers": tiers_of(preset),
        "trl_defaults": [asdict(default) for default in DEFAULTS],
        "hardware": {item.name: getattr(preset.hardware, item.name) for item in fields(Hardware)}
        | {"sources": dict(preset.hardware.sources)},
    }


def _summary(preset: Preset) -> dict[str, Any]:
    return {
        "name": preset.name,
        "hardware_name": preset.hardware.name,
        "method": preset.method,
        "strategy": preset.strategy,
        "devices": preset.processes,
        "per_device_train_batch_size": preset.micro_batch_size,
        "gradient_accumulation_steps": preset.gradient_accumulation_steps,
        "effective_batch_size": preset.effective_batch_size,
        "seq_len": preset.seq_len,
        "reference_model": preset.reference_model,
        "largest_model": largest_model(preset),
    }


def _figure(name: str, value) -> str:
    if value is None:
        return "not published" if name.endswith("flops") else "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("memory"):
        return gib(value)
    return f"{value / 1e12:.1f} TFLOP/s" if name.endswith("flops") else f"{value / 1e9:.4g} GB/s"

"""docs/api.md, docs/training.md, docs/presets.md: fields, profiles and presets, from the package itself."""

from dataclasses import MISSING, fields
from functools import partial
from typing import get_type_hints

from docs_tables.markdown import table

from hf_memopt import MemoryArguments, get_preset, list_presets
from hf_memopt.levers.arguments import PROFILES
from hf_memopt.presets.preset import METHODS, Preset
from hf_memopt.presets.reference import largest_model
from hf_memopt.recipe.recipe_arguments import RecipeArguments


def arguments(kind: type) -> str:
    """One row per field of a class of arguments."""
    types = get_type_hints(kind)  # HfArgumentParser rewrites the types on the fields themselves
    lines = []
    for item in fields(kind):
        of_type = types[item.name]
        name = (of_type.__name__ if isinstance(of_type, type) else str(of_type)).replace(" | ", " or ")
        default = "" if item.default is MISSING else f"`{item.default!r}`"
        lines.append([f"`{item.name}`", f"`{name}`", default, item.metadata.get("help", "")])
    return table(["field", "type", "default", "what it does"], lines)


def profiles() -> str:
    """One row per memory profile."""
    lines = [
        [f"{name} (default)" if name == "balanced" else name, *(f"{share:.2f}" for share in shares)]
        for name, shares in PROFILES.items()
    ]
    return table(["`memory_profile`", "target", "warning", "critical", "emergency"], lines)


def presets() -> str:
    """One row per preset: hardware, batch of full fine-tuning, the model of each method."""
    lines = []
    for name in list_presets():
        preset = get_preset(name)
        batches = preset.batches(preset.processes)
        micro, accumulation = preset.micro_batch_size, preset.gradient_accumulation_steps
        many = f"{preset.processes} × " if preset.processes > 1 else ""
        lines.append(
            [
                f"`{name}`",
                f"{many}{preset.hardware.label}",
                f"{micro} × {accumulation} × {batches} = {micro * accumulation * batches}",
                str(preset.seq_len),
                *(_models(get_preset(name, method)) for method in METHODS),
            ]
        )
    return table(["preset", "hardware", "batch (full)", "tokens (full)", "full", "LoRA", "QLoRA"], lines)


def _models(preset: Preset) -> str:
    """The model that a preset is for; in brackets a larger one that fits at micro-batch 1."""
    model, largest = preset.reference_model, largest_model(preset) or preset.reference_model
    short = [one.rpartition("/")[2] for one in dict.fromkeys([model, largest])]
    return f"{short[0]} ({short[1]})" if len(short) > 1 else short[0]


API = {
    "memory arguments": partial(arguments, MemoryArguments),
    "recipe arguments": partial(arguments, RecipeArguments),
    "profiles": profiles,
}

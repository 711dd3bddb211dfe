"""Named settings for every kind of hardware, as plain Hugging Face vocabulary."""

from hf_memopt.presets.named_presets import get_preset, list_presets, preset_by_name, strategies
from hf_memopt.presets.preset import DTYPES, METHOD_TITLES, METHODS, Preset

__all__ = [
    "DTYPES",
    "METHODS",
    "METHOD_TITLES",
    "Preset",
    "get_preset",
    "list_presets",
    "preset_by_name",
    "strategies",
]

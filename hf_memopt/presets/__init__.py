"""Named settings for every kind of hardware, as plain Hugging Face vocabulary."""

from hf_memopt.presets.named_presets import get_preset, list_presets, preset_by_name, strategies
from hf_memopt.presets.preset import DTYPES, METHODS, Preset

__all__ = ["DTYPES", "METHODS", "Preset", "get_preset", "list_presets", "preset_by_name", "strategies"]

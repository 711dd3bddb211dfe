"""The preset that stands for the devices of a plan."""

import re
from dataclasses import replace

from hf_memopt.errors import InputError, choose
from hf_memopt.hardware.catalog import DEVICES_PER_HOST
from hf_memopt.presets import Preset, get_preset, list_presets
from hf_memopt.presets.catalog import strategies
from hf_memopt.presets.preset import with_strategy


def preset_of(hardware: str | Preset, method: str, strategy: str | None = None) -> Preset:
    """The preset of one device, with the number of devices; strategy "none" leaves the engine open.

    Args:
        hardware: a preset's name, one with a number of devices behind it (rtx_4090x2, h100_80gb_x128), or a preset.

    Raises:
        InputError: no such hardware.
    """
    if strategy is not None and strategy not in strategies():
        raise choose("strategy", strategy, strategies())
    if isinstance(hardware, Preset):
        return hardware
    name, devices = hardware, 1
    if hardware not in (*list_presets(), "auto") and (several := re.fullmatch(r"(.+?)_?x(\d+)", hardware)):
        name, devices = several[1], int(several[2])
    if name not in (*list_presets(), "auto"):
        raise choose("hardware", hardware, [*list_presets(), "auto"])
    if devices < 1:
        raise InputError(f"hardware={hardware}: the number of devices must be at least 1")
    preset = get_preset(name, method, "none" if name == "auto" else None)
    if preset.processes > 1:
        batch, length = preset.effective_batch_size, preset.seq_len
        devices *= preset.processes
        single = get_preset(preset.hardware.name, method)
        preset = replace(single, effective_batch_size=batch, seq_len=length)
    preset = replace(preset, processes=devices, machines=-(-devices // DEVICES_PER_HOST))
    if strategy and strategy != "none":
        if devices == 1:
            raise InputError(f"strategy={strategy} connects several devices: say how many, as in {name}x2")
        preset = with_strategy(preset, strategy)
    return preset

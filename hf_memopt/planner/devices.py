"""The preset that stands for the devices of a plan."""

from dataclasses import replace

from hf_memopt.engines import engine_named
from hf_memopt.errors import InputError, choose
from hf_memopt.hardware.catalog import DEVICES_PER_HOST, read_devices
from hf_memopt.hardware.described import described_text
from hf_memopt.presets import Preset, preset_by_name
from hf_memopt.presets.named_presets import preset_name, strategies
from hf_memopt.presets.preset import with_strategy


def resolve_preset(
    hardware: str | Preset, method: str, strategy: str | None = None, world_size: int | None = None
) -> Preset:
    """The preset of one device, with the number of devices; strategy "none" leaves the engine open.

    Args:
        hardware: what get_preset() takes, alone or with a number of devices (rtx_4090x2, h100_80gb_x128, 2x3090), or a
            preset.
        world_size: the number of devices, where the name has none.

    Raises:
        InputError: no such hardware, or another number in its name.
    """
    if strategy is not None and strategy not in strategies():
        raise choose("strategy", strategy, strategies())
    if isinstance(hardware, Preset):
        return hardware
    name, devices = with_device_count(hardware, world_size)
    preset = preset_by_name(name, method, "none" if name == "auto" else None)
    preset = replace(preset, processes=devices, machines=_machines(devices))
    if strategy and strategy != "none":
        if devices == 1 and not engine_named(strategy).offloads_alone:
            raise InputError(f"strategy={strategy} connects several devices: say how many, as in {name}x2")
        preset = with_strategy(preset, strategy)
    return preset


def split_count(hardware: str) -> tuple[str, int]:
    """The name of a device or preset, and how many of it: what read_devices() reads, and of the name of a preset that
    is for two.

    Raises:
        InputError: as read_devices() raises it.
    """
    if described_text(hardware):
        return hardware, 1
    name = preset_name(hardware)
    if name == "auto":
        return name, 1
    if name is None:
        return read_devices(hardware)
    preset = preset_by_name(name)
    return (name, 1) if preset.processes == 1 else (preset.hardware.name, preset.processes)


def with_device_count(hardware: str, world_size: int | None) -> tuple[str, int]:
    """split_count() of a name whose number may stand beside it.

    Raises:
        InputError: the numbers differ.
    """
    name, devices = split_count(hardware)
    if devices > 1 and world_size not in (None, devices):
        raise InputError(f"hardware={hardware} and world_size={world_size} differ: leave one out")
    return name, world_size if devices == 1 and world_size else devices


def _machines(devices: int) -> int:
    """The fewest machines with equally many devices, at most eight, in each.

    Raises:
        InputError: only machines of one device each would do.
    """
    fewest = -(-devices // DEVICES_PER_HOST)
    machines = next(count for count in range(fewest, devices + 1) if devices % count == 0)
    if machines == devices > 1:
        below, above = (DEVICES_PER_HOST * count for count in (devices // DEVICES_PER_HOST, fewest))
        raise InputError(
            f"{devices} devices do not divide into machines of at most {DEVICES_PER_HOST}: plan {below} or {above}"
        )
    return machines

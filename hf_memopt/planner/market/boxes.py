"""The cards of the catalog as people have them: boxes of several, and which card stands for its kind."""

import re

from hf_memopt.estimator.timing.speed import peak_rate
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.catalog import catalog
from hf_memopt.hardware.measured import measured_value
from hf_memopt.presets.named_presets import nearest_preset
from hf_memopt.units import GIB

_LARGEST_BOX = 8  # devices of one machine
_DESKTOP_BOX = 12 * GIB  # nobody builds or rents boxes of cards with less


def box_name(device: Hardware, devices: int) -> str:
    """The box as `--hardware` takes it."""
    return device.name if devices == 1 else f"{device.name}x{devices}"


def boxes(device: Hardware) -> tuple[int, ...]:
    """The numbers of devices that people have of a card in one machine."""
    label = device.label
    if not device.discrete_memory or "Laptop" in label or "GH200" in label:
        return (1,)
    if "GB200" in label or "GB300" in label:  # trays of two superchips
        return (1, 2, 4)
    if re.search(r"GeForce|TITAN|Radeon (RX|VII)|Arc [AB]\d", label):
        return (1, 2, 4) if device.nominal_memory >= _DESKTOP_BOX else (1,)
    if re.search(r"Quadro|NVIDIA RTX|Radeon .*PRO|Arc Pro", label) and "Server" not in label:
        return (1, 2, 4, 8) if device.nominal_memory >= 48 * GIB else (1, 2, 4)
    return (1, 2, 4, 8)


def typical_cards() -> list[Hardware]:
    """The cards that have presets of their own, and the slowest card of each other kind."""
    chosen: dict[tuple, Hardware] = {}
    for device in sorted(all_cards(), key=_typicality):
        chosen.setdefault(_kind(device), device)
    own = [device for device in all_cards() if has_preset(device)]
    return list({device.name: device for device in [*own, *chosen.values()]}.values())


def has_preset(device: Hardware) -> bool:
    """True if the project tunes settings for this very card."""
    return nearest_preset(device) == device.name


def _kind(device: Hardware) -> tuple:
    """The key by which people compare cards: the maker, the sort of machine, and the memory."""
    machine = boxes(device)[-1] == _LARGEST_BOX if device.discrete_memory else "unified"
    return device.vendor, machine, device.nominal_memory


def _typicality(device: Hardware) -> tuple:
    # Laptops, and cards that torch's default wheels lack (compute capability below 7.5), are no one's first thought.
    unusual = "Laptop" in device.label or 0 < device.capability < 7.5
    return not has_preset(device), unusual, known_flops(device) is None, known_flops(device) or 0, device.name


def all_cards() -> list[Hardware]:
    """The cards of the catalog, without CPUs."""
    return [device for device in catalog().values() if device.backend != "cpu"]


def known_flops(device: Hardware) -> float | None:
    """FLOP/s of its matmuls, as measured or as published; None where neither is known."""
    return measured_value("matmul_flops_per_second", device) or peak_rate(device)

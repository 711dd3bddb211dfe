"""Host memory that one process may use: asked of this machine, or assumed from the boxes that cards come in."""

import re
from dataclasses import dataclass

from hf_memopt.hardware.catalog import Hardware
from hf_memopt.hardware.detection import host_memory
from hf_memopt.units import GIB, gib


@dataclass(frozen=True)
class HostMemory:
    """The host memory that each device may use.

    Attributes:
        bytes: for one process.
        source: where the figure comes from, in words.
        assumed: it is of a common box, and this one may be another.
    """

    bytes: int
    source: str
    assumed: bool = True


# (names in the catalog, GiB of host memory for each device, the box); the first counts. It is a small one of the boxes
# that clouds rent out with the card: a plan that needs more fails after hours, one that needs less loses a little.
_BOXES = (
    ("t4|p100.*", 12, "Google Colab's free machine with a T4, 12.7 GB"),
    (".*_laptop", 12, "a laptop of 16 GiB, less what its other programs take"),
    ("l4|a2|a10|a10g|a16", 16, "AWS g5.xlarge (A10G) and g6.xlarge (L4), 16 GiB for one"),
    ("l20|l40|l40s|a30|a40", 32, "AWS g6e.xlarge (L40S), 32 GiB for one"),
    ("v100.*", 61, "AWS p3.2xlarge, 61 GiB for one"),
    ("a100(_pcie)?_40gb", 79, "Google a2-highgpu-1g, 85 GB for one"),
    # AWS p4de.24xlarge has 144 GiB for each, Azure ND96amsr_A100_v4 237, NVIDIA DGX A100 256.
    ("a100.*|a800.*", 225, "Lambda gpu_8x_a100_80gb_sxm4, 1800 GiB for eight"),
    ("h100.*|h800.*|h20_.*", 200, "Lambda gpu_1x_h100_pcie, 200 GiB for one; AWS p5.48xlarge, 2048 GiB for eight"),
    ("mi3.*", 231, "Azure ND MI300X v5, 1850 GiB for eight"),
    ("h200.*|b200.*|b300.*|g[hb]200.*|gb300.*", 256, "AWS p5en and p6-b200, 2048 GiB for eight"),
)
_DESKTOP = (24, "a desktop with 32 GiB for each card, less what its other programs take")
_SERVER = (64, "a server with 64 GiB for each device")  # of large devices that the table lacks


def assumed_host_memory(device: Hardware) -> HostMemory:
    """The host memory that a box with this device is assumed to have for it; of unified memory, the machine's."""
    if not device.discrete_memory and device.nominal_memory:
        return HostMemory(device.nominal_memory, "unified memory, which holds what the device uses, too")
    usual = _SERVER if device.is_large and not device.name.startswith("rtx") else _DESKTOP
    size, source = next((box[1:] for box in _BOXES if re.fullmatch(box[0], device.name)), usual)
    return HostMemory(size * GIB, source)


def own_host_memory(processes: int) -> HostMemory:
    """The free memory of this machine, for each of so many processes on it."""
    import psutil

    free = min(host_memory(), psutil.virtual_memory().available)
    share = f", for each of {processes} processes" if processes > 1 else ""
    return HostMemory(free // processes, f"{gib(free)} are free on this machine{share}", assumed=False)

"""Detect this machine: a catalog entry where the device is known, a truthful generic one where it is not."""

import os
import platform
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from hf_memopt.hardware.catalog import Hardware, catalog, catalog_entry
from hf_memopt.hardware.described import described
from hf_memopt.hardware.device_names import product
from hf_memopt.units import GIB

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroup v2, v1


def get_hardware(name: str) -> Hardware:
    """A device by its name, this machine's for "auto", or one that the caller describes.

    Args:
        name: of the catalog, in its or people's spelling ("rtx_4090", "RTX 4090", "A100-80GB-PCIe"); a TOML file or
            a JSON object with fields of Hardware (hardware.described).

    Raises:
        InputError: the name is not in the catalog or not clear, or the description lacks something.
    """
    return detect() if name == "auto" else described(name) or catalog_entry(name)


def detect() -> Hardware:
    """The device that training on this machine would use.

    CUDA and ROCm (told apart by torch.version.hip), then XPU, MPS and the CPU. Memory is this machine's own; of
    several devices the first one is described. Imports torch.
    """
    import torch

    if torch.cuda.is_available():
        return _cuda(torch.cuda.get_device_properties(0), torch.version.hip)
    if torch.xpu.is_available():
        return _xpu(torch.xpu.get_device_properties(0))
    return _apple(torch.mps.recommended_max_memory()) if torch.backends.mps.is_available() else _cpu()


def counterpart(hardware: Hardware) -> Hardware | None:
    """This machine's device of the same kind (backend) as another one; None where it has none."""
    device = _cpu() if hardware.backend == "cpu" else detect()
    return device if device.backend == hardware.backend else None


def _cuda(properties, hip: str | None) -> Hardware:
    """A CUDA or ROCm device from PyTorch's properties object."""
    backend = "rocm" if hip else "cuda"
    if entry := _known(properties, backend):
        others = entry.unified_memory and not hip  # what catalog.toml's others_gib takes of the total
        return replace(entry, memory=min(properties.total_memory, entry.memory) if others else properties.total_memory)
    architecture = properties.gcnArchName.split(":")[0] if hip else f"{properties.major}.{properties.minor}"
    # gfx9 from gfx90a on (MI200, MI300) and gfx11 on (RDNA 3, 4) have bf16 matrix instructions.
    native = bool(re.match(r"gfx(90a|94|95|11|12)", architecture)) if hip else float(architecture) >= 8.0
    # Bytes/s from clock (kHz) and bus width (bits), two transfers a clock; None where the driver tells neither.
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return _generic(
        properties.name,
        vendor="amd" if hip else "nvidia",
        backend=backend,
        memory=properties.total_memory,
        native_bf16=native,
        fp8=bool(re.match(r"gfx(94|95|12)", architecture)) if hip else float(architecture) >= 8.9,
        architecture=architecture,
        bandwidth=2 * clock * 1000 * width / 8 if clock and width else None,
        unified_memory=bool(getattr(properties, "is_integrated", False)),
    )


def _known(properties, backend: str) -> Hardware | None:
    """The catalog's device of a reported name; of those sold with several memory sizes, the one of this size."""
    reported = product(properties.name)
    for device in catalog().values():
        named = re.search(device.reported, properties.name) if device.reported else product(device.label) == reported
        if device.backend == backend and named and _same_memory(properties.total_memory, device.nominal_memory):
            return device
    return None


def _xpu(properties) -> Hardware:
    if entry := _known(properties, "xpu"):
        return replace(entry, memory=properties.total_memory)
    return _generic(
        properties.name,
        vendor="intel",
        backend="xpu",
        memory=properties.total_memory,
        native_bf16=bool(getattr(properties, "has_bfloat16_conversions", False)),
        fp8=False,
        architecture=str(getattr(properties, "architecture", "")),
        unified_memory=not getattr(properties, "local_mem_size", 1),
    )


def _apple(working_set: int) -> Hardware:
    """An Apple chip; `working_set` is Metal's recommended limit in bytes."""
    import psutil

    chip = command_output("sysctl", "-n", "machdep.cpu.brand_string") or "Apple Silicon"
    total = psutil.virtual_memory().total
    for entry in catalog().values():
        if chip == f"Apple {entry.architecture}" and _same_memory(total, entry.nominal_memory):
            return replace(entry, memory=working_set)
    return _generic(
        f"{chip} {round(total / GIB)} GB",
        vendor="apple",
        backend="mps",
        memory=working_set,
        native_bf16=not re.search(r"M[12]\b", chip),
        fp8=False,
        architecture=chip.removeprefix("Apple "),
        unified_memory=True,
    )


def _cpu() -> Hardware:
    """This machine's CPU."""
    import psutil

    return replace(
        catalog_entry("cpu"),
        label=cpu_name(),
        nominal_memory=psutil.virtual_memory().total,
        memory=host_memory(),
        bandwidth=None,
        architecture=platform.machine(),
        sources=MappingProxyType({"memory": "this machine"}),
    )


def _generic(label: str, backend: str, memory: int, bandwidth: float | None = None, **figures) -> Hardware:
    """A device that the catalog lacks, from its own properties; what they do not tell is None."""
    return Hardware(
        name=f"generic_{backend}_{round(memory / GIB)}gb",
        label=label,
        backend=backend,
        nominal_memory=memory,
        memory=memory,
        bandwidth=bandwidth,
        bf16_flops=None,
        fp16_flops=None,
        host_link=None,
        peer_link=None,
        sources=MappingProxyType({"memory": "the device's own properties"}),
        **figures,
    )


def _same_memory(total: int, nominal: int) -> bool:
    # Drivers keep up to 9 % back (a T4 shows 14.56 of 16 GiB); the next size sold is at least 20 % away.
    return 0.88 * nominal <= total <= 1.02 * nominal


def host_memory() -> int:
    """Bytes of host memory that this process may use: what is installed, or a container's limit where that is less."""
    import psutil

    limits = [psutil.virtual_memory().total]
    for file in _CGROUP_LIMITS:
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" is no limit; cgroup v1 writes a number above any machine's memory for it
            limits.append(int(text))
    return min(limits)


def usable_processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's product name."""
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match.group(1) if match else platform.processor() or platform.machine()


def command_output(*command: str) -> str:
    """The output of a command, stripped; "" where it fails, is missing or takes longer than ten seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""

"""What this machine is: a catalog entry where the device is known, a truthful generic one where it is not."""

import os
import platform
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from hf_memopt.hardware.catalog import Hardware, catalog_entry
from hf_memopt.units import GIB

# Product name as PyTorch reports it -> catalog name; the first match wins, so longer names come first.
# Cards sold with several memory sizes must also match on memory (see _same_memory).
_NAMES = [
    (r"RTX 3090 Ti", "rtx_3090_ti"),
    (r"RTX 3060(?! Ti| Laptop)", "rtx_3060"),
    (r"RTX 3070(?! Ti| Laptop)", "rtx_3070"),
    (r"RTX 3080(?! Ti| Laptop)", "rtx_3080"),
    (r"RTX 3090", "rtx_3090"),
    (r"RTX 4080(?! SUPER| Laptop)", "rtx_4080"),
    (r"RTX 4090(?! D| Laptop)", "rtx_4090"),
    (r"RTX 5090(?! D| Laptop)", "rtx_5090"),
    (r"\bT4\b", "t4"),
    (r"V100.*32GB", "v100_32gb"),
    (r"\bL40S\b", "l40s"),
    (r"\bL4\b", "l4"),
    (r"A100.*40GB", "a100_40gb"),
    (r"A100.*80GB", "a100_80gb"),
    (r"H100(?! NVL| PCIe)", "h100_80gb"),
    (r"\bH200(?! NVL)", "h200"),
    (r"\bB200\b", "b200"),
    (r"RX 6750 XT", "rx_6750_xt"),
    (r"RX 7900 XTX", "rx_7900_xtx"),
    (r"MI300X", "mi300x"),
]
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroup v2, v1


def get_hardware(name: str) -> Hardware:
    """The catalog's entry for a name, or this machine's device for "auto".

    Raises:
        InputError: the name is not in the catalog.
    """
    return detect() if name == "auto" else catalog_entry(name)


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
    if torch.backends.mps.is_available():
        return _apple(torch.mps.recommended_max_memory())
    return _cpu()


def counterpart(hardware: Hardware) -> Hardware | None:
    """This machine's device of the same kind (backend) as another one; None where it has none."""
    found = _cpu() if hardware.backend == "cpu" else detect()
    return found if found.backend == hardware.backend else None


def _cuda(properties, hip: str | None) -> Hardware:
    """A CUDA or ROCm device from PyTorch's properties object."""
    for pattern, name in _NAMES:
        if re.search(pattern, properties.name):
            known = catalog_entry(name)
            if _same_memory(properties.total_memory, known.nominal_memory):
                return replace(known, memory=properties.total_memory)
    backend = "rocm" if hip else "cuda"
    architecture = properties.gcnArchName.split(":")[0] if hip else f"{properties.major}.{properties.minor}"
    # gfx9 from gfx90a on (MI200, MI300) and gfx11 on (RDNA 3, 4) have bf16 matrix instructions.
    native = bool(re.match(r"gfx(90a|94|95|11|12)", architecture)) if hip else float(architecture) >= 8.0
    return _generic(
        properties.name,
        vendor="amd" if hip else "nvidia",
        backend=backend,
        memory=properties.total_memory,
        native_bf16=native,
        fp8=bool(re.match(r"gfx(94|95|12)", architecture)) if hip else float(architecture) >= 8.9,
        architecture=architecture,
        bandwidth=_bus_bandwidth(properties),
        unified_memory=bool(getattr(properties, "is_integrated", False)),
    )


def _bus_bandwidth(properties) -> float | None:
    """Bytes/s from clock (kHz) and bus width (bits), two transfers a clock; None where the driver tells neither."""
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return 2 * clock * 1000 * width / 8 if clock and width else None


def _xpu(properties) -> Hardware:
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
    for name in ("apple_m2_8gb", "apple_m2_16gb", "apple_m4_max_64gb"):
        known = catalog_entry(name)
        if chip == f"Apple {known.architecture}" and _same_memory(total, known.nominal_memory):
            return replace(known, memory=working_set)
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


def _generic(label: str, **figures) -> Hardware:
    """A device that the catalog lacks, from its own properties; what they do not tell is None."""
    name = f"generic_{figures['backend']}_{round(figures['memory'] / GIB)}gb"
    figures.setdefault("bandwidth", None)
    figures.setdefault("unified_memory", False)
    return Hardware(
        name=name,
        label=label,
        nominal_memory=figures["memory"],
        bf16_flops=None,
        fp16_flops=None,
        host_link=None,
        peer_link=None,
        sources=MappingProxyType({"memory": "the device's own properties"}),
        **figures,
    )


def _same_memory(found: int, nominal: int) -> bool:
    # Drivers keep up to 9 % back (a T4 shows 14.56 of 16 GiB); the next size sold is at least 20 % away.
    return 0.88 * nominal <= found <= 1.02 * nominal


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
    """What a command prints, stripped; "" where it fails, is missing or takes longer than ten seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""

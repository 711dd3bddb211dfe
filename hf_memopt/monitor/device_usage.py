"""Every device of this machine as its driver reports it: memory, utilization, processes. Needs no torch.

NVIDIA through NVML (nvidia-ml-py), AMD through amdsmi (part of ROCm) or rocm-smi, Apple through ioreg, and the host.
"""

import json
import platform
import plistlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from hf_memopt.hardware.detection import command_output, cpu_name, host_memory

_AMD_MIB = 2**20  # amdsmi counts VRAM in MiB (amdsmi_vram_usage_t), processes' in bytes


@dataclass(frozen=True)
class Process:
    """A process that uses a device.

    Attributes:
        memory: bytes; None where the driver does not report them.
    """

    pid: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class Device:
    """One device at one moment.

    Attributes:
        label: the product's name.
        kind: nvidia, amd, apple or cpu.
        used, total: bytes.
        busy: share of the time that a kernel ran, 0 to 1; None where the driver does not report it.
        processes: the largest first.
    """

    label: str
    kind: str
    used: int
    total: int
    busy: float | None = None
    processes: tuple[Process, ...] = field(default=())

    @property
    def utilization(self) -> float:
        """Share of the memory that is used."""
        return self.used / self.total if self.total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, with `utilization`."""
        return asdict(self) | {"utilization": self.utilization}


def read_devices() -> list[Device]:
    """All devices, the host last."""
    return [*_nvidia(), *_amd(), *_apple(), _host()]


@contextmanager
def nvml() -> Iterator[tuple[Any, list]]:
    """pynvml and the handles of its cards; none where nvidia-ml-py or the driver's library is missing, or has no card:
    each in an error of its own."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        yield None, []
        return
    try:
        yield pynvml, [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _nvidia() -> list[Device]:
    devices = []
    with nvml() as (pynvml, handles):
        for handle in handles:
            memory, label = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetName(handle)
            try:
                busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            except pynvml.NVMLError:  # not available on a MIG slice
                busy = None
            try:
                running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except pynvml.NVMLError:
                running = []
            processes = [Process(entry.pid, _name(entry.pid), entry.usedGpuMemory) for entry in running]
            devices.append(Device(label, "nvidia", memory.used, memory.total, busy, _sorted(processes)))
    return devices


def _amd() -> list[Device]:
    try:
        import amdsmi
    except Exception:  # importing it loads ROCm's library, which may raise anything
        return _amd_by_command()
    try:
        amdsmi.amdsmi_init()
        try:
            return [_amd_device(amdsmi, handle) for handle in amdsmi.amdsmi_get_processor_handles()]
        finally:
            amdsmi.amdsmi_shut_down()
    except amdsmi.AmdSmiException:
        return _amd_by_command()


def _amd_device(amdsmi, handle) -> Device:
    memory = amdsmi.amdsmi_get_gpu_vram_usage(handle)
    busy = amdsmi.amdsmi_get_gpu_activity(handle).get("gfx_activity")
    processes = [
        Process(entry["pid"], entry["name"], entry["memory_usage"]["vram_mem"])
        for entry in amdsmi.amdsmi_get_gpu_process_list(handle)
    ]
    label = amdsmi.amdsmi_get_gpu_asic_info(handle)["market_name"]
    return Device(
        label,
        "amd",
        memory["vram_used"] * _AMD_MIB,
        memory["vram_total"] * _AMD_MIB,
        busy / 100 if isinstance(busy, int | float) else None,
        _sorted(processes),
    )


def _amd_by_command() -> list[Device]:
    """AMD cards from rocm-smi, which names them card0, card1, …."""
    output = command_output("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showuse", "--json")
    try:
        cards = json.loads(output) if output else {}
    except ValueError:
        return []
    devices = []
    for name, card in sorted(cards.items()):
        if not name.startswith("card") or "VRAM Total Memory (B)" not in card:
            continue
        busy = card.get("GPU use (%)", "")
        label = card.get("Card Series") or card.get("Card series") or card.get("Card Model") or name
        devices.append(
            Device(
                label,
                "amd",
                int(card["VRAM Total Used Memory (B)"]),
                int(card["VRAM Total Memory (B)"]),
                float(busy) / 100 if str(busy).isdigit() else None,
            )
        )
    return devices


def _apple() -> list[Device]:
    """The GPU of Apple Silicon, whose memory is the host's."""
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return []
    output = command_output("ioreg", "-r", "-d", "1", "-a", "-c", "IOAccelerator")
    try:
        figures = plistlib.loads(output.encode())[0].get("PerformanceStatistics", {}) if output else {}
    except (ValueError, IndexError, plistlib.InvalidFileException):
        figures = {}
    busy = figures.get("Device Utilization %")
    used = figures.get("In use system memory", 0)
    label = command_output("sysctl", "-n", "machdep.cpu.brand_string") or "Apple Silicon"
    limit = command_output("sysctl", "-n", "iogpu.wired_limit_mb")  # of what the GPU may wire, where the user set one
    total = (int(limit) * 2**20 if limit.isdigit() else 0) or psutil.virtual_memory().total
    return [Device(f"{label} GPU", "apple", used, total, busy / 100 if busy is not None else None)]


def _host() -> Device:
    memory, total = psutil.virtual_memory(), host_memory()
    processes = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        info = process.info
        if info["memory_info"] is not None and info["memory_info"].rss > 256 * 2**20:
            processes.append(Process(info["pid"], info["name"] or "", info["memory_info"].rss))
    used = min(total, memory.total - memory.available)
    return Device(f"{cpu_name()} (host)", "cpu", used, total, psutil.cpu_percent(None) / 100, _sorted(processes))


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "?"


def _sorted(processes: list[Process], limit: int = 5) -> tuple[Process, ...]:
    return tuple(sorted(processes, key=lambda process: -(process.memory or 0))[:limit])

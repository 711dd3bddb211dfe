"""Every device of this machine as its driver sees it: memory, how busy it is, who uses it. Needs no torch.

NVIDIA by NVML (nvidia-ml-py), AMD by amdsmi, which comes with ROCm, or rocm-smi, Apple by ioreg, and the host.
"""

import json
import platform
import plistlib
import subprocess
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from hf_memopt.hardware.detection import cpu_name
from hf_memopt.monitor.readers import host_capacity

_AMD_MIB = 2**20  # amdsmi counts VRAM in MiB (amdsmi_vram_usage_t), processes' in bytes


@dataclass(frozen=True)
class Process:
    """Who uses a device.

    Attributes:
        memory: bytes; None where the driver does not tell.
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
        busy: share of the time that something ran, 0 to 1; None where the driver does not tell.
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
    """All of them, the host last."""
    return [*_nvidia(), *_amd(), *_apple(), _host()]


def _nvidia() -> list[Device]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []  # no driver, so no card
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [_nvidia_device(pynvml, handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def _nvidia_device(pynvml, handle) -> Device:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except pynvml.NVMLError:  # a MIG slice tells none
        busy = None
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        running = []
    processes = [Process(one.pid, _name(one.pid), one.usedGpuMemory) for one in running]
    label = pynvml.nvmlDeviceGetName(handle)
    return Device(label, "nvidia", memory.used, memory.total, busy, _sorted(processes))


def _amd() -> list[Device]:
    try:
        import amdsmi
    except Exception:  # it loads ROCm's library when it is imported, and raises what that raises
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
        Process(one["pid"], one["name"], one["memory_usage"]["vram_mem"])
        for one in amdsmi.amdsmi_get_gpu_process_list(handle)
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
    """What rocm-smi prints; it names the cards card0, card1, …."""
    said = _output("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showuse", "--json")
    try:
        cards = json.loads(said) if said else {}
    except ValueError:
        return []
    found = []
    for name, card in sorted(cards.items()):
        if not name.startswith("card") or "VRAM Total Memory (B)" not in card:
            continue
        busy = card.get("GPU use (%)", "")
        label = card.get("Card Series") or card.get("Card series") or card.get("Card Model") or name
        found.append(
            Device(
                label,
                "amd",
                int(card["VRAM Total Used Memory (B)"]),
                int(card["VRAM Total Memory (B)"]),
                float(busy) / 100 if str(busy).isdigit() else None,
            )
        )
    return found


def _apple() -> list[Device]:
    """The GPU of Apple Silicon, whose memory is the host's."""
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return []
    said = _output("ioreg", "-r", "-d", "1", "-a", "-c", "IOAccelerator")
    try:
        figures = plistlib.loads(said.encode())[0].get("PerformanceStatistics", {}) if said else {}
    except (ValueError, IndexError, plistlib.InvalidFileException):
        figures = {}
    busy = figures.get("Device Utilization %")
    used = figures.get("In use system memory", 0)
    label = _output("sysctl", "-n", "machdep.cpu.brand_string") or "Apple Silicon"
    total = _wired_limit() or psutil.virtual_memory().total
    return [Device(f"{label.strip()} GPU", "apple", used, total, busy / 100 if busy is not None else None)]


def _wired_limit() -> int | None:
    """Bytes that the GPU may keep, where somebody has set it."""
    said = _output("sysctl", "-n", "iogpu.wired_limit_mb").strip()
    return int(said) * 2**20 if said.isdigit() and int(said) else None


def _host() -> Device:
    memory, total = psutil.virtual_memory(), host_capacity()
    processes = []
    for one in psutil.process_iter(["pid", "name", "memory_info"]):
        if one.info["memory_info"] is not None and one.info["memory_info"].rss > 256 * 2**20:
            processes.append(Process(one.info["pid"], one.info["name"] or "", one.info["memory_info"].rss))
    used = min(total, memory.total - memory.available)
    return Device(f"{cpu_name()} (host)", "cpu", used, total, psutil.cpu_percent(None) / 100, _sorted(processes))


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "?"


def _sorted(processes: list[Process], most: int = 5) -> tuple[Process, ...]:
    return tuple(sorted(processes, key=lambda one: -(one.memory or 0))[:most])


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""

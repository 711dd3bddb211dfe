"""Reads the memory of a device and its host, in bytes. Resets no peak counters, which others may rely on."""

import os
import re
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil

from hf_memopt.hardware.detection import host_memory

_PROCESS = psutil.Process()


@dataclass(frozen=True)
class Reading:
    """Memory at one moment, in bytes.

    Attributes:
        allocated: held by this process's tensors on the device; resident memory on a CPU.
        reserved: held by the allocator, cached blocks included.
        peak_allocated, peak_reserved: since the process began, or since the counters were last reset.
        used: on the device by all processes.
        capacity: of the device, or this process's limit where that is smaller.
        retries: number of times that the allocator had to free its cache to find a block.
        host_resident, host_available: resident memory of this process; memory available on the host.
    """

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    used: int
    capacity: int
    retries: int
    host_resident: int
    host_available: int

    @property
    def free(self) -> int:
        """Bytes of the device that no process uses."""
        return max(0, self.capacity - self.used)

    @property
    def utilization(self) -> float:
        """Share of the capacity that the allocator holds for tensors now."""
        return self.allocated / self.capacity

    @property
    def fragmentation(self) -> float:
        """Share of reserved memory that held no tensor, at the peak."""
        return 1 - self.peak_allocated / self.peak_reserved if self.peak_reserved else 0.0

    def to_dict(self) -> dict:
        """The fields by name, with `free`."""
        return asdict(self) | {"free": self.free}


class Reader:
    """Reads one device.

    Args:
        device: a torch.device; by default the one that training would use here.
        limit: bytes that this process may use, where that is less than the device's memory.
    """

    def __init__(self, device=None, limit: int | None = None) -> None:
        import torch

        if device is None:
            device = next((name for name in ("cuda", "xpu", "mps") if getattr(torch, name).is_available()), "cpu")
        self.device = torch.device(device)
        self.limit = limit
        self.kind = self.device.type if self.device.type in ("cuda", "xpu", "mps") else "cpu"
        self._module = getattr(torch, self.kind, None)
        self._host_memory = host_memory()

    def allocated(self) -> int:
        """Bytes of tensors now; the cheapest reading."""
        if self.kind == "mps":
            return self._module.current_allocated_memory()
        return _PROCESS.memory_info().rss if self.kind == "cpu" else self._module.memory_allocated(self.device)

    def read(self) -> Reading:
        """All figures."""
        host = {"host_resident": _PROCESS.memory_info().rss, "host_available": psutil.virtual_memory().available}
        read = {"mps": self._read_mps, "cpu": self._read_cpu}.get(self.kind, self._read_cuda)
        figures = read(host)
        capacity = min(figures.pop("capacity"), self.limit or 2**62)
        return Reading(**figures, **host, capacity=capacity)

    def capacity(self) -> int:
        """Bytes that this process may use."""
        return self.read().capacity

    def busy(self) -> float | None:
        """Share of the driver's last sampling period (1/6 s to 1 s) in which a kernel ran; None where unknown."""
        if self.kind != "cuda":
            return None
        try:
            return self._module.utilization(self.device) / 100
        except Exception:  # without nvidia-ml-py or amdsmi, or on a MIG slice; each raises its own type
            return None

    def _read_cuda(self, host) -> dict:
        """CUDA, ROCm and XPU: this process from torch's allocator, all processes from the driver."""
        stats = self._module.memory_stats(self.device)
        free, total = self._module.mem_get_info(self.device)
        if getattr(self._module.get_device_properties(self.device), "is_integrated", False):
            # Unified memory: what other programs use on the host is not available to the device.
            total = min(total, total - free + host["host_available"])
        return {
            "allocated": stats.get("allocated_bytes.all.current", 0),
            "reserved": stats.get("reserved_bytes.all.current", 0),
            "peak_allocated": stats.get("allocated_bytes.all.peak", 0),
            "peak_reserved": stats.get("reserved_bytes.all.peak", 0),
            "used": total - free,
            "capacity": total,
            "retries": stats.get("num_alloc_retries", 0),
        }

    def _read_mps(self, host) -> dict:
        """Metal reports no peaks: the driver's figure, which does not shrink during training, takes their place."""
        current, driver = self._module.current_allocated_memory(), self._module.driver_allocated_memory()
        return {
            "allocated": current,
            "reserved": driver,
            "peak_allocated": current,
            "peak_reserved": driver,
            "used": driver,
            "capacity": self._module.recommended_max_memory(),
            "retries": 0,
        }

    def _read_cpu(self, host) -> dict:
        resident, peak = host["host_resident"], peak_resident()
        return {
            "allocated": resident,
            "reserved": resident,
            "peak_allocated": peak,
            "peak_reserved": peak,
            "used": max(resident, self._host_memory - host["host_available"]),
            "capacity": self._host_memory,
            "retries": 0,
        }


def peak_resident() -> int:
    """Peak resident memory of this process in bytes."""
    if sys.platform == "linux":  # getrusage would include the peak of the parent process before exec
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    if sys.platform == "win32":
        return _PROCESS.memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def process_limited(device, gib: float | None):
    """A context in which this process's allocator refuses to exceed a limit; yields whether it does.

    Args:
        gib: GiB of device memory; None for no limit. The CPU allocator has no limit.
    """
    import torch

    if gib is None or device.type not in ("cuda", "xpu", "mps"):
        yield False
        return
    size = gib * 2**30
    if device.type == "mps":
        # torch 2.13 has no getter for MPS: read the variable that MPSAllocator reads at its start (default 1.7).
        before = float(os.environ.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "1.7"))
        share = min(2.0, size / torch.mps.recommended_max_memory())
        limit = torch.mps.set_per_process_memory_fraction
    else:
        module = getattr(torch, device.type)
        before = module.get_per_process_memory_fraction(device)
        share = min(1.0, size / module.get_device_properties(device).total_memory)
        limit = partial(module.set_per_process_memory_fraction, device=device)
    limit(share)
    try:
        yield True
    finally:
        limit(before)

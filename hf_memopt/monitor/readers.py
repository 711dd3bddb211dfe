"""What a device and its host say of memory, in bytes. Nothing here resets a counter: other readers have theirs."""

import os
import re
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil

_PROCESS = psutil.Process()
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Reading:
    """Bytes, at one moment.

    Attributes:
        allocated: of tensors of this process on its device; resident memory on a CPU.
        reserved: what the allocator holds, with what it keeps for later.
        peak_allocated, peak_reserved: the most so far, since the process began or whoever resets them did.
        used: of the device by all processes.
        capacity: of the device, or this process's own limit.
        retries: times that the allocator had to free its cache to find a block (a number).
        host_resident, host_available: of this process, and left on the host.
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
        """Bytes that nobody uses on the device."""
        return max(0, self.capacity - self.used)

    @property
    def utilization(self) -> float:
        """Share of the capacity that the allocator holds for tensors now."""
        return self.allocated / self.capacity

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that no tensor was in, at the peak."""
        return 1 - self.peak_allocated / self.peak_reserved if self.peak_reserved else 0.0

    def to_dict(self) -> dict:
        """The fields by name, with `free`."""
        return asdict(self) | {"free": self.free}


class Reader:
    """Reads one device.

    Args:
        device: a torch.device; by default what training here would use.
        limit: bytes that this process may use, where that is less than the device has.
    """

    def __init__(self, device=None, limit: int | None = None) -> None:
        import torch

        self.device = torch.device(device) if device is not None else _usual_device()
        self.limit = limit
        self.kind = self.device.type if self.device.type in ("cuda", "xpu", "mps") else "cpu"
        self._module = getattr(torch, self.kind, None)
        self._host_capacity = host_capacity()

    def allocated(self) -> int:
        """Bytes of tensors now; the cheapest question."""
        if self.kind == "mps":
            return self._module.current_allocated_memory()
        if self.kind == "cpu":
            return _PROCESS.memory_info().rss
        return self._module.memory_allocated(self.device)

    def read(self) -> Reading:
        """Everything."""
        host = {"host_resident": _PROCESS.memory_info().rss, "host_available": psutil.virtual_memory().available}
        found = getattr(self, f"_read_{'cuda' if self.kind == 'xpu' else self.kind}")(host)
        capacity = min(found.pop("capacity"), self.limit or 2**62)
        return Reading(**found, **host, capacity=capacity)

    def capacity(self) -> int:
        """Bytes that this process may use."""
        return self.read().capacity

    def busy(self) -> float | None:
        """Share of the last moment (a sixth of a second to one, the driver says which) in which the device computed;
        None where the driver does not tell."""
        if self.kind != "cuda":
            return None
        try:
            return self._module.utilization(self.device) / 100
        except Exception:  # without nvidia-ml-py or amdsmi, on a MIG slice: each with an error type of its own
            return None

    def _read_cuda(self, host) -> dict:
        """CUDA, ROCm and XPU: torch's allocator for this process, the driver for all."""
        stats = self._module.memory_stats(self.device)
        free, total = self._module.mem_get_info(self.device)
        if getattr(self._module.get_device_properties(self.device), "is_integrated", False):
            # Host and device share memory: what the host's other programs use is gone for the device too.
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
        """Metal tells no peaks: the driver's figure, which does not shrink while training, stands for them."""
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
        capacity = self._host_capacity
        return {
            "allocated": resident,
            "reserved": resident,
            "peak_allocated": peak,
            "peak_reserved": peak,
            "used": max(resident, capacity - host["host_available"]),
            "capacity": capacity,
            "retries": 0,
        }


def peak_resident() -> int:
    """Bytes: the most host memory that this process has had; what it has now where the system does not say."""
    if sys.platform == "linux":  # getrusage's figure begins with that of the process that started this one
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
    if sys.platform == "win32":
        return _PROCESS.memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def host_capacity() -> int:
    """Bytes of host memory that this process may use: a container's limit, or what is built in."""
    limits = [psutil.virtual_memory().total]
    for name in _CGROUP_LIMITS:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def _usual_device():
    import torch

    for name in ("cuda", "xpu", "mps"):
        if getattr(torch, name).is_available():
            return torch.device(name)
    return torch.device("cpu")


@contextmanager
def process_limited(device, gib: float | None):
    """A context in which the allocator refuses what is beyond a limit of this process; yields whether it does.

    Args:
        gib: GiB of the device; None for no limit. A CPU's allocator has none.
    """
    import torch

    if gib is None or device.type not in ("cuda", "xpu", "mps"):
        yield False
        return
    size = gib * 2**30
    if device.type == "mps":
        # torch 2.13 has no getter here: the default is read as MPSAllocator reads it when it starts.
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

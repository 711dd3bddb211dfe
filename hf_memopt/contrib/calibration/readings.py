"""Memory as a device, its allocator and its driver report it, also before CUDA has started."""

import os
from contextlib import contextmanager
from pathlib import Path

from hf_memopt.monitor.device_usage import nvml


def accelerator() -> str:
    """The device that is measured: cuda (ROCm's too), mps, or cpu for a rehearsal."""
    import torch

    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # a rehearsal, also on a Mac
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def driver_bytes() -> dict[str, int]:
    """Bytes of every card that its driver has given to anybody, by card. Starts neither CUDA nor ROCm, whose context
    is to be measured."""
    # Memory by PCI address, from the amdgpu driver's files: neither amdsmi nor rocm-smi need be installed.
    files = Path("/sys/bus/pci/devices").glob("*/mem_info_vram_used")
    with nvml() as (pynvml, handles):
        nvidia = {
            pynvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-"): pynvml.nvmlDeviceGetMemoryInfo(handle).used
            for handle in handles
        }
    return {**nvidia, **{file.parent.name: int(file.read_text()) for file in files}}


def this_card(used: dict[str, int]) -> str:
    """The key in driver_bytes() of the first device of this process; starts CUDA."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    if not torch.version.hip:
        return str(properties.uuid)
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None not in parts:
        return "{:04x}:{:02x}:{:02x}.0".format(*parts)
    return next(iter(used)) if len(used) == 1 else ""  # of several cards an older PyTorch does not say which


def synchronize() -> None:
    """Wait for the device's work."""
    import torch

    if (kind := accelerator()) != "cpu":
        getattr(torch, kind).synchronize()


@contextmanager
def peaks():
    """The block's peaks: a dict that has allocated_bytes, reserved_bytes and device_bytes afterwards.

    On MPS reserved bytes alone. On a CPU allocated bytes alone: the peak of what the block itself allocates, by the
    profiler's events.
    """
    import torch

    figures: dict[str, int | None] = {"reserved_bytes": None, "device_bytes": None}
    kind = accelerator()
    if kind == "cuda":
        idle = driver_bytes()
        torch.cuda.reset_peak_memory_stats()
        yield figures
        used, card = driver_bytes(), this_card(idle)
        figures["allocated_bytes"] = torch.cuda.max_memory_allocated()
        figures["reserved_bytes"] = torch.cuda.max_memory_reserved()
        figures["device_bytes"] = used[card] - idle[card] if card in used and card in idle else None
        return
    if kind == "mps":  # keeps no peak; what it took from Metal it gives back only when asked
        yield figures
        figures["allocated_bytes"], figures["reserved_bytes"] = None, torch.mps.driver_allocated_memory()
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield figures
    live = figures["allocated_bytes"] = 0
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        figures["allocated_bytes"] = max(figures["allocated_bytes"], live)

"""The bytes that an out-of-memory message names, and whose they are: this process's own or other processes'.

torch lists the processes that NVML reports. It says "this process" of the one with its own process id; in a container,
whose process ids are not the host's, it finds none and lists its own memory as another's ("Process 4242 has ...").
"""

import re

from hf_memopt.units import GIB, MIB

# Bounded, so that a long row of digits costs linear time.
_SIZE = r"(?<![\d.])(\d{1,9}(?:\.\d{1,9})?) (GiB|MiB|KiB|GB|MB|KB|bytes)\b"
_FIGURES = {
    "asked_bytes": rf"[Tt]r(?:ied|ying) to allocate {_SIZE}",
    "capacity_bytes": rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity|max allowed: {_SIZE}",  # "capacty" in 2.1
    "limit_bytes": rf"{_SIZE} allowed;",  # set_per_process_memory_fraction
    "free_bytes": rf"of which {_SIZE} is free|; {_SIZE} free",
    "allocated_bytes": rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated|MPS allocated: {_SIZE}",
    "unused_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated|{_SIZE} cached\)",  # the latter before 1.5
    # Metal's, outside torch's heaps, in this process: MPSAllocator.mm subtracts the heaps from its own device's total.
    "outside_torch_bytes": rf"other allocations: {_SIZE}",
    "reserved_bytes": rf"{_SIZE} reserved in total by PyTorch",  # torch before 2.1
    "own_bytes": rf"this process has {_SIZE} memory in use",
}
_LISTED = re.compile(rf"Process \d{{1,12}} has {_SIZE} memory in use")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": MIB, "GiB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_METAL_UNITS = _UNITS | {"KB": 2**10, "MB": MIB, "GB": GIB}  # MPSAllocator's format_size divides by powers of two
# Of a process beside its tensors: a CUDA context, kernels, workspaces.
_CONTEXT = GIB
_ROUNDED = 16 * MIB  # a message rounds each figure to 0.01 GiB
_START = re.compile(r"out of memory\b|[Tt]r(?:ied|ying) to allocate ", re.IGNORECASE)


def parse_figures(message: str) -> dict[str, int]:
    """The bytes that a message names; of several messages the last one's, since each is about its own device."""
    if starts := [match.start() for match in _START.finditer(message)]:
        message = message[message.rfind("\n", 0, starts[-1]) + 1 :]  # from the line on in which the last one begins
    units = _METAL_UNITS if "MPS" in message else _UNITS
    figures = {}
    for name, pattern in _FIGURES.items():
        sizes = [_bytes(match.groups(), units) for match in re.finditer(pattern, message)]
        if sizes:
            figures[name] = sizes[-1]
    return _attribute(figures, [_bytes(match.groups(), units) for match in _LISTED.finditer(message)])


def _bytes(groups: tuple[str | None, ...], units: dict[str, int]) -> int:
    number, unit = (part for part in groups if part is not None)
    return int(float(number) * units[unit])


def _attribute(figures: dict[str, int], listed: list[int]) -> dict[str, int]:
    """The figures with what is this process's own and what is others', which the device can hold together."""
    capacity, allocated = figures.get("capacity_bytes"), figures.get("allocated_bytes")
    reserved = figures.pop("reserved_bytes", None)
    if reserved is not None and allocated is not None:
        figures.setdefault("unused_bytes", max(0, reserved - allocated))
    if capacity is None or "limit_bytes" in figures or "outside_torch_bytes" in figures:
        return figures
    free, tensors = figures.get("free_bytes", 0), (allocated or 0) + figures.get("unused_bytes", 0)
    # Under WSL NVML reports 2**64 bytes of a process whose memory it does not know.
    listed = [size for size in listed if size <= capacity]
    if figures.get("own_bytes", 0) > capacity:
        figures.pop("own_bytes")
    # The listed process that is this one holds its tensors, and the smallest that does is nearest to them. NVML lists
    # all processes of a device or none, so of a single one that is large enough it is certain.
    own = min((size for size in listed if size >= tensors - _ROUNDED), default=None)
    if "own_bytes" not in figures and allocated is not None and own:
        figures["own_bytes"] = own
        listed.remove(own)
    most = capacity - free - max(figures.get("own_bytes", 0), tensors)
    if not listed and "own_bytes" not in figures and allocated is not None and "free_bytes" in figures:
        # Nothing is listed: what torch did not reserve may be its own context, unless that is far too much.
        listed = [size for size in [most - _CONTEXT] if size > capacity // 4]
    if others := max(0, min(sum(listed), most)):
        figures["others_bytes"] = others
    return figures

"""Allocations of a recorded stretch of training: when each came and went, and what it was for."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hf_memopt.errors import InputError

KINDS = ("parameters", "gradients", "optimizer_states", "activations", "temporaries", "other")
_BEGIN, _END = float("-inf"), float("inf")
_OPTIMIZERS = ("/optim/", "/optimization.py", "/ops/adam/", "torchao/optim")
_AUTOGRAD = ("torch/autograd/", "torch/_tensor.py")
_MODELS = ("torch/nn/modules/", "/modeling_", "/models/")


@dataclass
class Allocation:
    """One block of memory.

    Attributes:
        address, size: in bytes.
        began, ended: microseconds since 1970; infinite where it was there before, or stayed.
        frames: innermost first, dicts of `filename`, `line`, `name`.
        module: of the model, in whose forward it was made.
        kind: one of KINDS.
        name: of the weight, gradient or state.
    """

    address: int
    size: int
    began: float = _BEGIN
    ended: float = _END
    frames: list[dict[str, Any]] = field(default_factory=list)
    module: str = ""
    kind: str = ""
    name: str = ""


@dataclass
class Recording:
    """A snapshot of one device, put in order.

    Attributes:
        allocations: by their beginning.
        marks: time, `step` or `phase`, and which; empty in files that SnapshotCallback did not write.
        segments: what the allocator took from the device: dicts of `total_size`, `blocks`, …; empty without CUDA.
        out_of_memory: bytes that were asked for in vain, and free then, each time.
        about: `reason`, `device`, `capacity` (bytes), where they are known.
    """

    allocations: list[Allocation]
    marks: list[tuple[float, str, str]]
    segments: list[dict[str, Any]]
    out_of_memory: list[tuple[int, int]]
    about: dict[str, Any]

    @property
    def steps(self) -> list[tuple[str, float, float]]:
        """The recorded optimizer steps: name, beginning, end."""
        begun = [(time, name) for time, kind, name in self.marks if kind == "step"]
        ends = [time for time, _ in begun[1:]] + [_END]
        return [(name, time, end) for (time, name), end in zip(begun, ends, strict=False) if name != "end"]

    def phase(self, moment: float) -> str:
        """forward, backward, optimizer or between at a moment; empty where nobody said."""
        at = bisect_right(self._phase_times, moment) - 1
        return self._phase_names[at] if at >= 0 else ""

    def visit(self, moment: float) -> int:
        """Which phase it is, counted."""
        return bisect_right(self._phase_times, moment)

    def __post_init__(self) -> None:
        phases = [(time, name) for time, kind, name in self.marks if kind == "phase"]
        self._phase_times = [time for time, _ in phases]
        self._phase_names = [name for _, name in phases]


def recording_of(snapshot: dict[str, Any]) -> Recording:
    """The busiest device's allocations, each with its kind.

    Raises:
        InputError: the file has no allocations, or is damaged.
    """
    try:
        traces, stacks = snapshot["device_traces"], snapshot.get("stacks")
        device = max(range(len(traces)), key=lambda index: len(traces[index]), default=0)
        segments = [one for one in snapshot.get("segments", ()) if one.get("device", device) == device]
        about = snapshot.get("hf_memopt", {})
        trace = traces[device] if traces else []
        allocations = _allocations(trace, stacks, segments, about.get("owners", ()))
        failed = [(one["size"], one.get("device_free", 0)) for one in trace if one["action"] == "oom"]
        marks = sorted((time, kind, name) for time, kind, name in about.get("marks", ()))
        found = Recording(allocations, marks, segments, failed, {k: about[k] for k in _ABOUT if k in about})
        _name(found, about.get("owners", ()))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"the snapshot is damaged: {type(error).__name__} {error}") from error
    if not found.allocations:
        raise InputError("the snapshot has no allocations: recording was not on (torch.cuda.memory."
                         "_record_memory_history, or SnapshotCallback)")  # fmt: skip
    return found


_ABOUT = ("reason", "device", "capacity")


def _allocations(trace, stacks, segments, owners) -> list[Allocation]:
    """Every block of the trace, and those that were there before it began or are in the segments at its end."""
    live: dict[int, Allocation] = {}
    found: list[Allocation] = []
    for event in trace:
        action, address, moment = event["action"], event.get("addr"), event.get("time_us", 0)
        if action in ("alloc", "free_completed") and address is None:
            raise ValueError(f"{action} without addr")
        if action == "alloc":
            frames = stacks[event["stack"]] if stacks is not None else event.get("frames") or []
            one = Allocation(address, event["size"], moment, frames=frames, module=event.get("user_metadata") or "")
            live[address] = one
            found.append(one)
        elif action == "free_completed":
            one = live.pop(address, None)
            if one is None:  # older than the trace
                one = Allocation(address, event["size"])
                found.append(one)
            one.ended = moment
    seen = {(one.address, one.size) for one in found}
    for address, size, frames in _still_there(segments):
        if address not in live:
            found.append(Allocation(address, size, frames=frames))
            seen.add((address, size))
    if not segments:  # without CUDA only the owners know what was there before
        starts = {one.address: one.began for one in reversed(found)}
        for moment, address, size, _, _ in owners:
            if starts.get(address, _END) > moment and (address, size) not in seen:
                found.append(Allocation(address, size))
                seen.add((address, size))
    return sorted(found, key=lambda one: one.began)


def _still_there(segments) -> Iterable[tuple[int, int, list]]:
    """Blocks that are in use at the end: address, bytes, frames."""
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                size = block.get("requested_size", block["size"])
                yield block.get("address", address), size, block.get("frames") or []
            address += block["size"]


def _name(found: Recording, owners) -> None:
    """Say what each allocation is for: by its owner's address, else by when it was made and how long it lived."""
    by_address = defaultdict(list)
    for moment, address, _, kind, name in owners:
        by_address[address].append((moment, kind, name))
    for one in found.allocations:
        owner = next(((kind, name) for moment, kind, name in by_address.get(one.address, ())
                      if one.began <= moment < one.ended), None)  # fmt: skip
        one.kind, one.name = owner or (_kind(found, one, bool(by_address)), "")


def _kind(found: Recording, one: Allocation, owned: bool) -> str:
    phase = (found.phase(one.began) if one.began != _BEGIN else "between") or phase_by_frames(one.frames)
    if phase == "between":
        return "other"
    ended = found.visit(one.ended) if one.ended != _END else _END
    if found.marks and ended == found.visit(one.began):
        return "temporaries"
    if not found.marks and one.ended != _END and phase != "forward":
        return "temporaries"
    if phase == "optimizer":
        return "other" if owned else "optimizer_states"
    return "activations" if phase == "forward" else "gradients"


def phase_by_frames(frames) -> str:
    """Which phase a stack is of, in a file that does not say. On CUDA backward has a thread without Python frames."""
    files = [frame.get("filename", "") for frame in frames]
    if any(part in file for file in files for part in _OPTIMIZERS):
        return "optimizer"
    if not files or any(part in file for file in files for part in _AUTOGRAD):
        return "backward"
    return "forward" if any(part in file for file in files for part in _MODELS) else "between"

"""The allocations of a memory snapshot: when each was made and freed, and what it held."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hf_memopt.errors import InputError, one_line
from hf_memopt.terminal import plain

KINDS = ("parameters", "gradients", "optimizer_states", "activations", "temporaries", "other")
_BEGIN, _END = float("-inf"), float("inf")
_MOST_FRAMES = 300  # of a stack, the innermost; Python's recursion limit is 1000
_OPTIMIZERS = ("/optim/", "/optimization.py", "/ops/adam/", "torchao/optim")
_AUTOGRAD = ("torch/autograd/", "torch/_tensor.py")
_MODELS = ("torch/nn/modules/", "/modeling_", "/models/")


@dataclass
class Allocation:
    """One block of memory.

    Attributes:
        address, size: in bytes.
        began, ended: microseconds since 1970; infinite where it is older than the recording, or was not freed in it.
        frames: dicts of `filename`, `line`, `name`, innermost first.
        module: name of the module whose forward made it.
        kind: one of KINDS.
        name: name of the weight, gradient or optimizer state.
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
    """The snapshot of one device.

    Attributes:
        allocations: in the order they were made.
        marks: (time, "step" or "phase", its name); empty in files that SnapshotCallback did not write.
        segments: the CUDA allocator's segments, dicts of `total_size`, `blocks`, …; empty without CUDA.
        out_of_memory: (bytes asked for, bytes free) of each failed allocation.
        about: `reason`, `device`, `capacity` (bytes), where they are known.
    """

    allocations: list[Allocation]
    marks: list[tuple[float, str, str]]
    segments: list[dict[str, Any]]
    out_of_memory: list[tuple[int, int]]
    about: dict[str, Any]

    @property
    def steps(self) -> list[tuple[str, float, float]]:
        """The recorded optimizer steps: name, start and end in microseconds."""
        begun = [(time, name) for time, kind, name in self.marks if kind == "step"]
        ends = [time for time, _ in begun[1:]] + [_END]
        return [(name, time, end) for (time, name), end in zip(begun, ends, strict=False) if name != "end"]

    def phase(self, moment: float) -> str:
        """forward, backward, optimizer or between at a time; "" where it was not recorded."""
        index = bisect_right(self._phase_times, moment) - 1
        return self._phase_names[index] if index >= 0 else ""

    def phase_number(self, moment: float) -> int:
        """Number of phases that had begun by a time."""
        return bisect_right(self._phase_times, moment)

    def __post_init__(self) -> None:
        phases = [(time, name) for time, kind, name in self.marks if kind == "phase"]
        self._phase_times = [time for time, _ in phases]
        self._phase_names = [name for _, name in phases]


def parse_recording(snapshot: dict[str, Any]) -> Recording:
    """The allocations of the device with most of them, each with its kind.

    Raises:
        InputError: the snapshot has no allocations, or is damaged.
    """
    try:
        recording, owners = _read(snapshot)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"the snapshot is damaged: {type(error).__name__} {one_line(error)}: record it again"
        ) from error
    if not recording.allocations:
        raise InputError(
            "the snapshot has no allocations: recording was not on (torch.cuda.memory._record_memory_history, or "
            "SnapshotCallback)"
        )
    # Set each allocation's kind: its owner's, else by the phase that made it and the one that freed it.
    by_address, phases = defaultdict(list), {}
    for owner in sorted(owners, key=lambda owner: owner.moment):
        by_address[owner.address].append(owner)
    for allocation in recording.allocations:
        candidates = by_address.get(allocation.address, ())
        first = bisect_left(candidates, allocation.began, key=lambda owner: owner.moment)
        if first < len(candidates) and candidates[first].moment < allocation.ended:
            allocation.kind, allocation.name = candidates[first].kind, candidates[first].name
        else:
            if id(allocation.frames) not in phases:  # once for all allocations that share the stack
                phases[id(allocation.frames)] = phase_by_frames(allocation.frames)
            allocation.kind = _kind(recording, allocation, bool(by_address), phases[id(allocation.frames)])
    return recording


def _read(snapshot: dict[str, Any]) -> tuple[Recording, list["_Owner"]]:
    """The recording in a snapshot, with checked types, and the owners of its addresses."""
    traces, stacks = snapshot["device_traces"], snapshot.get("stacks")
    device = max(range(len(traces)), key=lambda index: len(traces[index]), default=0)
    segments = [_segment(raw) for raw in snapshot.get("segments", ()) if raw.get("device", device) == device]
    about = snapshot.get("hf_memopt", {})
    owners = [_owner(*raw) for raw in about.get("owners", ())]
    trace = traces[device] if traces else []
    allocations = _allocations(trace, _Frames(stacks), segments, owners)
    failed = [
        (_size(event["size"]), _size(event.get("device_free", 0))) for event in trace if event["action"] == "oom"
    ]
    marks = sorted((_moment(time), str(kind), str(name)) for time, kind, name in about.get("marks", ()))
    return Recording(allocations, marks, segments, failed, _about(about)), owners


@dataclass(frozen=True)
class _Owner:
    """The tensor that an address held at a time."""

    moment: float
    address: int
    size: int
    kind: str
    name: str


def _owner(moment, address, size, kind, name) -> _Owner:
    if kind not in KINDS:
        raise ValueError(f"an owner of kind {kind!r:.60}, not one of {', '.join(KINDS)}")
    return _Owner(_moment(moment), _size(address), _size(size), kind, str(name))


def _about(about: dict[str, Any]) -> dict[str, Any]:
    """Reason, device and capacity, as far as the file has them."""
    texts = {name: plain(str(about[name])) for name in ("reason", "device") if about.get(name) is not None}
    return texts | ({"capacity": _size(about["capacity"])} if about.get("capacity") is not None else {})


def _size(value: Any) -> int:
    """A number of bytes, or an address."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise ValueError(f"{value!r:.60} is not a number of bytes")
    return value


def _moment(value: Any) -> float:
    """Microseconds since 1970."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise ValueError(f"{value!r:.60} is not a time")
    return value


class _Frames:
    """Reads each stack once: very many allocations may share one.

    Args:
        stacks: stacks that allocations refer to by index; None where each has its own frames.
    """

    def __init__(self, stacks: list | None) -> None:
        self._stacks, self._read = stacks, {}

    def read(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """The frames of an event or a block, innermost first."""
        numbered = self._stacks is not None and "stack" in event
        raw = self._stacks[event["stack"]] if numbered else event.get("frames") or ()
        if id(raw) not in self._read:  # unique while the snapshot holds it
            self._read[id(raw)] = [_frame(frame) for frame in raw[:_MOST_FRAMES]]
        return self._read[id(raw)]


def _frame(raw: dict[str, Any]) -> dict[str, Any]:
    texts = {name: plain(str(raw.get(name, ""))) for name in ("filename", "name")}
    return texts | {"line": _size(raw.get("line", 0))}


def _segment(raw: dict[str, Any]) -> dict[str, Any]:
    blocks = [
        {
            "size": _size(block["size"]),
            "requested_size": _size(block.get("requested_size", block["size"])),
            "address": None if block.get("address") is None else _size(block["address"]),
            "state": str(block["state"]),
            "frames": block.get("frames"),
        }
        for block in raw["blocks"]
    ]
    return {"address": _size(raw["address"]), "total_size": _size(raw["total_size"]), "blocks": blocks}


def _allocations(trace, stacks: _Frames, segments, owners: list[_Owner]) -> list[Allocation]:
    """Every block of the trace, and older ones that are in the segments or have an owner."""
    live: dict[int, Allocation] = {}
    allocations: list[Allocation] = []
    for event in trace:
        action = event["action"]
        if action not in ("alloc", "free_completed"):
            continue
        address, size, moment = _size(event.get("addr")), _size(event["size"]), _moment(event.get("time_us", 0))
        if action == "alloc":
            module = plain(str(event.get("user_metadata") or ""))
            allocation = Allocation(address, size, moment, frames=stacks.read(event), module=module)
            live[address] = allocation
            allocations.append(allocation)
        else:
            allocation = live.pop(address, None)
            if allocation is None:  # older than the trace
                allocation = Allocation(address, size)
                allocations.append(allocation)
            allocation.ended = moment
    seen = {(allocation.address, allocation.size) for allocation in allocations}
    for address, size, block in _active_blocks(segments):
        if address not in live:
            allocations.append(Allocation(address, size, frames=stacks.read({"frames": block["frames"]})))
            seen.add((address, size))
    if not segments:  # without CUDA only the owners show what is older
        starts = {allocation.address: allocation.began for allocation in reversed(allocations)}
        for owner in owners:
            if starts.get(owner.address, _END) > owner.moment and (owner.address, owner.size) not in seen:
                allocations.append(Allocation(owner.address, owner.size))
                seen.add((owner.address, owner.size))
    return sorted(allocations, key=lambda allocation: allocation.began)


def _active_blocks(segments) -> Iterable[tuple[int, int, dict[str, Any]]]:
    """Blocks in use at the end: address, bytes, and the block."""
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                yield address if block["address"] is None else block["address"], block["requested_size"], block
            address += block["size"]


def _kind(recording: Recording, allocation: Allocation, owned: bool, stack_phase: str) -> str:
    phase = (recording.phase(allocation.began) if allocation.began != _BEGIN else "between") or stack_phase
    if phase == "between":
        return "other"
    ended = recording.phase_number(allocation.ended) if allocation.ended != _END else _END
    if recording.marks and ended == recording.phase_number(allocation.began):
        return "temporaries"
    if not recording.marks and allocation.ended != _END and phase != "forward":
        return "temporaries"
    if phase == "optimizer":
        return "other" if owned else "optimizer_states"
    return "activations" if phase == "forward" else "gradients"


def phase_by_frames(frames) -> str:
    """The phase of a stack, in a file without marks. On CUDA, backward runs in a thread without Python frames."""
    files = [frame.get("filename", "") for frame in frames]
    if any(part in file for file in files for part in _OPTIMIZERS):
        return "optimizer"
    if not files or any(part in file for file in files for part in _AUTOGRAD):
        return "backward"
    return "forward" if any(part in file for file in files for part in _MODELS) else "between"

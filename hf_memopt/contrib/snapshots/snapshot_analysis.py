"""Analyzes a memory snapshot: the peak by kind, the largest allocations, fragmentation and growth."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hf_memopt.contrib.snapshots.snapshot_file import read_snapshot
from hf_memopt.contrib.snapshots.snapshot_recording import KINDS, Allocation, Recording, parse_recording

_SKIPPED_FRAMES = ("site-packages/torch/", "hf_memopt/monitor/", "<built-in", "contextlib.py", "threading.py")

_MOST_STEPS = 100  # the last steps, whose growth is analyzed: each takes a pass over all allocations


@dataclass(frozen=True)
class Snapshot:
    """The analysis of a snapshot; sizes in bytes.

    Attributes:
        about: `reason`, `device`, `capacity`, as far as the file has them.
        peak_bytes: the most that was allocated at once within the recording.
        peak_phase: forward, backward, optimizer or between; empty where the file does not record it.
        peak_step: the optimizer step of the peak; None where the file does not record it.
        by_kind: kind -> bytes at the peak; they add up to it.
        by_module: module (with `*` for a layer's number) -> bytes of activations at the peak, largest first.
        largest: the largest allocations at the peak, grouped by stack: `size`, `count`, `kind`, `name`, `stack`.
        fragmentation: `reserved`, `allocated`, `unused` and `largest_unused` at the end, `share` unused; None without
            CUDA's segments.
        growth: for each step but the first: `step`, `resting` (allocated after it), `grown`, and `kept`:
            allocations made in it and still there, as in `largest`.
        out_of_memory: bytes `asked` for and `free`, for each time that memory ran out.
        timeline: seconds since the beginning, and bytes by kind.
    """

    about: dict[str, Any]
    peak_bytes: int
    peak_phase: str
    peak_step: str | None
    by_kind: dict[str, int]
    by_module: dict[str, int]
    largest: list[dict[str, Any]]
    fragmentation: dict[str, Any] | None
    growth: list[dict[str, Any]]
    out_of_memory: list[dict[str, int]]
    timeline: list[tuple[float, dict[str, int]]]

    def to_dict(self) -> dict[str, Any]:
        """The analysis as one JSON object, without the timeline."""
        fields = asdict(self)
        del fields["timeline"]
        return fields


def analyze_snapshot(file, top: int = 10) -> Snapshot:
    """Read and analyze a snapshot file.

    Args:
        file: what SnapshotCallback or torch.cuda.memory._dump_snapshot wrote.
        top: number of allocations and modules to list.

    Raises:
        InputError: it cannot be read, or is not a snapshot.
    """
    return analyze_recording(parse_recording(read_snapshot(file)), top)


def analyze_recording(recording: Recording, top: int = 10) -> Snapshot:
    """Analyze a recording."""
    timeline, moment = _timeline(recording.allocations)
    alive = [block for block in recording.allocations if block.began <= moment < block.ended]
    by_kind = Counter()
    by_module = Counter()
    for block in alive:
        by_kind[block.kind] += block.size
        if block.kind == "activations":
            by_module[_generalize(block.module) or "(outside modules)"] += block.size
    return Snapshot(
        about=recording.about,
        peak_bytes=sum(by_kind.values()),
        peak_phase=recording.phase(moment),
        peak_step=next((name for name, began, ended in recording.steps if began <= moment < ended), None),
        by_kind={kind: by_kind[kind] for kind in KINDS},
        by_module=dict(by_module.most_common(top)),
        largest=_largest(alive, top),
        fragmentation=_fragmentation(recording.segments),
        growth=_growth(recording, top),
        out_of_memory=[{"asked": requested, "free": free} for requested, free in recording.out_of_memory],
        timeline=timeline,
    )


def _timeline(allocations: list[Allocation], points: int = 1500) -> tuple[list[tuple[float, dict[str, int]]], float]:
    """Bytes by kind over time, thinned to the highest point of each interval; and the time of the peak."""
    changes = []
    for block in allocations:
        changes.append((block.began, block.size, block.kind))
        if block.ended != float("inf"):
            changes.append((block.ended, -block.size, block.kind))
    changes.sort(key=lambda change: (change[0], change[1]))  # at equal times, frees before allocations
    interval = max(1, len(changes) // points)
    sizes, total = Counter(), 0
    line, best, at = [], (-1, 0.0, {}), (-1, 0.0)
    start = next((time for time, _, _ in changes if time != float("-inf")), 0.0)
    for number, (time, size, kind) in enumerate(changes):
        sizes[kind] += size
        total += size
        if total > at[0]:
            at = (total, time)
        if total >= best[0]:
            best = (total, max(0.0, (time - start) / 1e6), dict(sizes))
        if (number + 1) % interval == 0 or number + 1 == len(changes):
            line.append(best[1:])
            best = (-1, 0.0, {})
    return line, at[1]


def _generalize(module: str) -> str:
    """A module's name with `*` for layer numbers, which groups equal layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _largest(allocations: Iterable[Allocation], top: int) -> list[dict[str, Any]]:
    """Allocations grouped by stack, kind and name, the largest group first."""
    groups: defaultdict[tuple, list[Allocation]] = defaultdict(list)
    stacks: dict[int, tuple[str, ...]] = {}  # by id of the frames, which many allocations share
    for block in allocations:
        if id(block.frames) not in stacks:
            stacks[id(block.frames)] = tuple(_stack(block))
        groups[block.kind, _generalize(block.name), _generalize(block.module), stacks[id(block.frames)]].append(block)
    ordered = sorted(groups.items(), key=lambda item: -sum(block.size for block in item[1]))
    return [
        {
            "size": sum(block.size for block in blocks),
            "count": len(blocks),
            "kind": kind,
            "name": name or module,
            "stack": list(stack),
        }
        for (kind, name, module, stack), blocks in ordered[:top]
    ]


def _stack(block: Allocation, limit: int = 6) -> list[str]:
    """The operator and the innermost frames outside of torch."""
    lines = []
    for frame in block.frames:
        file, name = frame.get("filename", ""), frame.get("name", "")
        if not file and not lines and name:
            lines.append(name)
        elif file and not any(part in file for part in _SKIPPED_FRAMES) and not file.startswith("torch/"):
            short = "/".join(file.rsplit("/", 3)[-2:])
            lines.append(f"{short}:{frame.get('line', 0)} {name}")
    return lines[:limit]


def _fragmentation(segments) -> dict[str, Any] | None:
    if not segments:
        return None
    reserved = sum(segment["total_size"] for segment in segments)
    unused = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    return {
        "reserved": reserved,
        "allocated": reserved - sum(unused),
        "unused": sum(unused),
        "largest_unused": max(unused, default=0),
        "share": sum(unused) / reserved if reserved else 0.0,
    }


def _growth(recording: Recording, top: int) -> list[dict[str, Any]]:
    """Allocations made in each step that are still there after it, without weights, gradients and states."""
    rows, before = [], None
    for name, began, ended in recording.steps[-_MOST_STEPS:]:
        moment = next(
            (
                time
                for time, kind, phase in recording.marks
                if kind == "phase" and phase == "between" and began <= time <= ended
            ),
            ended,
        )
        alive = [block for block in recording.allocations if block.began <= moment < block.ended]
        resting = sum(block.size for block in alive)
        if before is not None:
            new = [block for block in alive if block.began >= began and block.kind not in KINDS[:3]]
            rows.append({"step": name, "resting": resting, "grown": resting - before, "kept": _largest(new, top)})
        before = resting
    return rows

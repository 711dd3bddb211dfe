"""What a memory snapshot tells: the peak and what it is made of, the largest blocks, fragments, and what grows."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hf_memopt.reports.snapshot_file import read_snapshot
from hf_memopt.reports.snapshot_recording import KINDS, Allocation, Recording, parse_recording

_OWN = ("site-packages/torch/", "hf_memopt/monitor/", "<built-in", "contextlib.py", "threading.py")

_MOST_STEPS = 100  # whose growth is looked at, the last: each of them looks at all allocations


@dataclass(frozen=True)
class Snapshot:
    """Everything in bytes.

    Attributes:
        about: `reason`, `device`, `capacity`, as far as the file says.
        peak_bytes: the most that was allocated at once within the recording.
        peak_phase: forward, backward, optimizer or between; empty where the file does not say.
        peak_step: the optimizer step it was in; None where the file does not say.
        by_kind: kind -> bytes at the peak, which sum to it.
        by_module: module (with `*` for a layer's number) -> bytes of activations at the peak, largest first.
        largest: the peak's largest blocks, those of one place together: `size`, `count`, `kind`, `name`, `stack`.
        fragmentation: `reserved`, `allocated`, `unused` and `largest_unused` at the end, `share` unused; None without
            CUDA's segments.
        growth: for each step but the first: `step`, `resting` (after it), `grown`, and `kept`: what was made in it and
            stayed, largest first, as in `largest`.
        out_of_memory: `asked` and `free`, each time that memory ran out.
        timeline: moments (seconds from the beginning) and bytes by kind.
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
        """As one JSON object, without the timeline."""
        told = asdict(self)
        del told["timeline"]
        return told


def analyze_snapshot(file, top: int = 10) -> Snapshot:
    """Read a file and say what it tells.

    Args:
        file: what SnapshotCallback or torch.cuda.memory._dump_snapshot wrote.
        top: how many blocks and modules to list.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    return analyze_recording(parse_recording(read_snapshot(file)), top)


def analyze_recording(found: Recording, top: int = 10) -> Snapshot:
    """What a recording tells."""
    timeline, moment = _timeline(found.allocations)
    alive = [one for one in found.allocations if one.began <= moment < one.ended]
    by_kind = Counter()
    by_module = Counter()
    for one in alive:
        by_kind[one.kind] += one.size
        if one.kind == "activations":
            by_module[_general(one.module) or "(outside modules)"] += one.size
    return Snapshot(
        about=found.about,
        peak_bytes=sum(by_kind.values()),
        peak_phase=found.phase(moment),
        peak_step=next((name for name, began, ended in found.steps if began <= moment < ended), None),
        by_kind={kind: by_kind[kind] for kind in KINDS},
        by_module=dict(by_module.most_common(top)),
        largest=_largest(alive, top),
        fragmentation=_fragmentation(found.segments),
        growth=_growth(found, top),
        out_of_memory=[{"asked": asked, "free": free} for asked, free in found.out_of_memory],
        timeline=timeline,
    )


def _timeline(allocations: list[Allocation], points: int = 1500) -> tuple[list[tuple[float, dict[str, int]]], float]:
    """Bytes by kind over time, thinned so that every stretch keeps its fullest moment; and the moment of the peak."""
    changes = []
    for one in allocations:
        changes.append((one.began, one.size, one.kind))
        if one.ended != float("inf"):
            changes.append((one.ended, -one.size, one.kind))
    changes.sort(key=lambda change: (change[0], change[1]))  # of one moment what is given back comes first
    stretch = max(1, len(changes) // points)
    now, total = Counter(), 0
    line, best, at = [], (-1, 0.0, {}), (-1, 0.0)
    start = next((time for time, _, _ in changes if time != float("-inf")), 0.0)
    for number, (time, size, kind) in enumerate(changes):
        now[kind] += size
        total += size
        if total > at[0]:
            at = (total, time)
        if total >= best[0]:
            best = (total, max(0.0, (time - start) / 1e6), dict(now))
        if (number + 1) % stretch == 0 or number + 1 == len(changes):
            line.append(best[1:])
            best = (-1, 0.0, {})
    return line, at[1]


def _general(module: str) -> str:
    """A module's name with `*` for numbers: what one layer needs, all layers need."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _largest(allocations: Iterable[Allocation], top: int) -> list[dict[str, Any]]:
    """Blocks of one place in the code put together, the largest first."""
    places: defaultdict[tuple, list[Allocation]] = defaultdict(list)
    stacks: dict[int, tuple[str, ...]] = {}  # by identity: very many allocations may share one
    for one in allocations:
        if id(one.frames) not in stacks:
            stacks[id(one.frames)] = tuple(_stack(one))
        places[one.kind, _general(one.name), _general(one.module), stacks[id(one.frames)]].append(one)
    ordered = sorted(places.items(), key=lambda item: -sum(one.size for one in item[1]))
    return [
        {
            "size": sum(one.size for one in blocks),
            "count": len(blocks),
            "kind": kind,
            "name": name or module,
            "stack": list(stack),
        }
        for (kind, name, module, stack), blocks in ordered[:top]
    ]


def _stack(one: Allocation, most: int = 6) -> list[str]:
    """The innermost frames that say something: the operator, then code that is not torch's own machinery."""
    told = []
    for frame in one.frames:
        file, name = frame.get("filename", ""), frame.get("name", "")
        if not file and not told and name:
            told.append(name)
        elif file and not any(part in file for part in _OWN) and not file.startswith("torch/"):
            short = "/".join(file.rsplit("/", 3)[-2:])
            told.append(f"{short}:{frame.get('line', 0)} {name}")
    return told[:most]


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


def _growth(found: Recording, top: int) -> list[dict[str, Any]]:
    """What is still there after each step that was made in it, beside weights, gradients and states."""
    told, before = [], None
    for name, began, ended in found.steps[-_MOST_STEPS:]:
        moment = next(
            (
                time
                for time, kind, phase in found.marks
                if kind == "phase" and phase == "between" and began <= time <= ended
            ),
            ended,
        )
        there = [one for one in found.allocations if one.began <= moment < one.ended]
        resting = sum(one.size for one in there)
        if before is not None:
            made = [one for one in there if one.began >= began and one.kind not in KINDS[:3]]
            told.append({"step": name, "resting": resting, "grown": resting - before, "kept": _largest(made, top)})
        before = resting
    return told

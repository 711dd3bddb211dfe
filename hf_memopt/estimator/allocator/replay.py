"""Reserved memory: a job's allocations replayed through a model of the device's allocator."""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hf_memopt.estimator.accounting.ledger import STACK, Event, TraceResult
from hf_memopt.estimator.allocator.caching import Block, CachingAllocator
from hf_memopt.estimator.allocator.metal import Buffer, MetalAllocator
from hf_memopt.hardware import Hardware

_POSITION = re.compile(r"\b(first|between|last)\b")
_TIMELINE_POINTS = 2000  # about; each is the highest of its stretch


@dataclass(frozen=True)
class Replay:
    """A job's memory over time.

    Attributes:
        allocated: peak, bytes.
        reserved: peak of what the caching allocator reserves with expandable segments ("expandable") and without
            ("segments"), bytes; the same on MPS, and `allocated` on a CPU, which caches nothing.
        timeline: the peak of equal numbers of events, in bytes, and the segment in which they ended.
    """

    allocated: int
    reserved: dict[str, int]
    timeline: tuple[tuple[str, int], ...]


def replay(trace: TraceResult, period: int, added: int, device: Hardware) -> Replay:
    """Run a job's allocations and frees through the allocator.

    Args:
        trace: of a model with `added` × `period` layers fewer.
    """
    allocators = _allocators(device)
    blocks: dict[tuple[int, int], tuple[list[Block | Buffer], int]] = {}
    live, heights, visits = 0, [], []
    for name, size, visit in stretch(trace, period, added):
        if size:
            blocks[name] = ([allocator.allocate(size) for allocator in allocators], size)
            live += size
        elif name in blocks:
            allocated, size = blocks.pop(name)
            live -= size
            for allocator, block in zip(allocators, allocated, strict=True):
                allocator.release(block)
        heights.append(live)
        visits.append(visit)
    highest = max(heights, default=0)
    width = max(1, len(heights) // _TIMELINE_POINTS)
    timeline = tuple(
        (trace.segments[visits[min(at + width, len(visits)) - 1]], max(heights[at : at + width]))
        for at in range(0, len(heights), width)
    )
    peaks = [max(highest, allocator.peak) for allocator in allocators] or [highest]
    return Replay(highest, {"expandable": peaks[0], "segments": peaks[-1]}, timeline)


def _allocators(device: Hardware) -> list[CachingAllocator] | list[MetalAllocator]:
    """The replay with and without expandable segments where a device has them; none on a CPU."""
    if device.backend == "cpu":
        return []
    if device.backend == "mps":
        return [MetalAllocator()]
    return [CachingAllocator(expandable, device.memory) for expandable in (True, False)]


def stretch(trace: TraceResult, period: int, added: int) -> Iterator[tuple[tuple[int, int], int, int]]:
    """The events of a deep model from those of a shallow one.

    Layers far from both ends are alike: the n-th allocation in one is the n-th allocation in the next. One period of
    them, the block, is repeated `added` times. Where a layer frees what its neighbour allocated, its copy frees what
    the neighbour's copy allocated; outside the layers, an allocation of the block stands for those of all its copies.

    Yields:
        Name of the allocation (number, copy), its bytes or 0 for a free, and the visit of a segment.
    """
    naming = _Naming(trace, period, added)
    layer_before: int | None = None
    # Consecutive events in one block of layers, in one other layer, or outside the layers.
    runs = itertools.groupby(trace.events, lambda event: naming.block_with(event.layer) or event.layer)
    for run in (list(events) for _, events in runs):
        layer = run[0].layer
        block = naming.block_with(layer)
        rising = layer_before is None or block is None or layer_before < block[0]
        for copy in (0,) if block is None else range(added + 1) if rising else range(added, -1, -1):
            for event in run:
                for name in naming.names(event, copy, block, layer):
                    yield name, event.size, event.visit
        layer_before = layer


class _Naming:
    """The allocations of the deep model that an event of the shallow one stands for.

    Attributes:
        blocks: stack -> the layers that are repeated: the period before the last layer.
    """

    def __init__(self, trace: TraceResult, period: int, added: int):
        self._period, self._added = period, added
        self.blocks = _find_blocks(trace, period) if added else {}
        self._owner, self._counterpart = _find_owners(trace)

    def block_with(self, layer: int | None) -> range | None:
        """The block that contains a layer."""
        block = self.blocks.get(_stack(layer))
        return block if block is not None and layer in block else None

    def names(self, event: Event, copy: int, block: range | None, layer: int | None) -> list[tuple[int, int]]:
        """The names, (allocation, copy), of what an event allocates or frees.

        Args:
            copy: of the block that is replayed.
            block: the block that the event's run is in; None outside.
            layer: of the run.
        """
        number = event.allocation
        owner = self._owner.get(number)
        home = self.block_with(owner)
        if block is not None:
            return [(number, copy)] if home == block else [self._of_neighbour(number, owner, copy, block)]
        if home is None:
            return [(number, 0)]
        if layer is not None and _stack(layer) == _stack(owner):  # next to the block: its nearest copy
            return [(number, self._added if layer > owner else 0)]
        return [(number, copy) for copy in range(self._added + 1)]

    def _of_neighbour(self, number: int, owner: int | None, copy: int, block: range) -> tuple[int, int]:
        """Find what a layer of the block frees of its neighbours: except at the block's ends that belongs to the copy
        before or after."""
        if owner is not None and _stack(owner) == _stack(block[0]):
            step = -1 if owner < block[0] else 1
            alike = owner - step * self._period
            if 0 <= copy + step <= self._added and alike in block:
                return self._counterpart(number, alike), copy + step
        return number, 0


def _find_owners(trace: TraceResult) -> tuple[dict[int, int], Callable[[int, int], int]]:
    """The layer of every allocation, and a function that finds its counterpart in another layer: the n-th allocation
    of the layer's m-th visit to a segment of that kind."""
    owner: dict[int, int] = {}
    position: dict[int, tuple[str, int, int]] = {}  # allocation -> kind of segment, m, n
    at_position: dict[tuple[int, str, int, int], int] = {}
    visits: dict[tuple[int, str], int] = defaultdict(int)
    visit, count, kind = -1, 0, ""
    for event in trace.events:
        number, layer = event.allocation, event.layer
        if layer is not None and event.visit != visit:
            visit, count = event.visit, 0
            kind = _POSITION.sub("", trace.segments[visit])
            visits[layer, kind] += 1
        if not event.size:
            continue
        if layer is not None:
            owner[number] = layer
            position[number] = (kind, visits[layer, kind], count)
            at_position[layer, *position[number]] = number
            count += 1
        elif number in trace.layers:
            owner[number] = trace.layers[number]
    return owner, lambda number, layer: at_position.get((layer, *position.get(number, ("", 0, 0))), number)


def _stack(layer: int | None) -> int | None:
    return None if layer is None else layer // STACK


def _find_blocks(trace: TraceResult, period: int) -> dict[int, range]:
    layers = {event.layer for event in trace.events if event.layer is not None}
    deepest = {_stack(layer): layer for layer in sorted(layers)}
    return {stack: range(last - period, last) for stack, last in deepest.items() if last % STACK > period}

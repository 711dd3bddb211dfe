"""Reserved memory: the events of a job replayed through a model of CUDA's caching allocator.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: requests are rounded to 512 bytes; up to 1 MiB they come from
segments of 2 MiB, below 10 MiB from segments of 20 MiB, else from a segment of their own, rounded to 2 MiB; the
smallest free block that is large enough is taken, and split where enough remains; neighbours that are free are
joined. With expandable_segments there is one segment for small and one for large blocks, which grows at its end.
"""

import re
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

from hf_memopt.estimator.accounting.ledger import BLOCK, STACK, Books, Event
from hf_memopt.hardware import Hardware

_MIB = 2**20
_POSITION = re.compile(r"\b(first|between|last)\b")
_POINTS = 2000  # of a timeline
_SMALL = _MIB  # bytes; the largest request that is served from small segments
_PAGES = {"small": 2 * _MIB, "large": 20 * _MIB}
_OWN_SEGMENT = 10 * _MIB  # from this size on a request gets a segment of its own


class _Block:
    __slots__ = ("address", "free", "next", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: str):
        self.address, self.size, self.pool = address, size, pool
        self.free, self.previous, self.next = True, None, None


class CachingAllocator:
    """What the allocator has taken from the device.

    Attributes:
        reserved: bytes now.
        peak: bytes at most.

    Args:
        expandable: expandable_segments is on.
        limit: bytes of the device; before going beyond, free segments are given back.
    """

    def __init__(self, expandable: bool, limit: int | None = None):
        self.reserved = 0
        self.peak = 0
        self._expandable = expandable
        self._limit = limit
        self._free: dict[str, list[tuple[int, int]]] = {"small": [], "large": []}
        self._at: dict[int, _Block] = {}
        self._tails: dict[str, _Block | None] = {"small": None, "large": None}
        self._end = 0

    def allocate(self, size: int) -> _Block:
        """A block of at least `size` bytes."""
        size = -(-max(size, 1) // BLOCK) * BLOCK
        pool = "small" if size <= _SMALL else "large"
        free = self._free[pool]
        place = bisect_left(free, (size, -1))
        block = self._at[free.pop(place)[1]] if place < len(free) else self._grow(size, pool)
        block.free = False
        self._split(block, size)
        return block

    def release(self, block: _Block) -> None:
        """Give a block back to the cache, joined with free neighbours."""
        block.free = True
        before, after = block.previous, block.next
        if after is not None and after.free:
            self._join(block, after)
        if before is not None and before.free:
            self._unlist(before)
            self._join(before, block, listed=False)
            block = before
        insort(self._free[block.pool], (block.size, block.address))

    def _join(self, first: _Block, second: _Block, listed: bool = True) -> None:
        """Make the second block, which follows the first, a part of it."""
        if listed:
            self._unlist(second)
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.previous = first
        if self._tails[first.pool] is second:
            self._tails[first.pool] = first
        del self._at[second.address]

    def _unlist(self, block: _Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect_left(free, (block.size, block.address)))

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        if rest < (BLOCK if block.pool == "small" or self._expandable else _SMALL + 1):
            return
        after = _Block(block.address + size, rest, block.pool)
        after.previous, after.next = block, block.next
        if block.next is not None:
            block.next.previous = after
        if self._tails[block.pool] is block:
            self._tails[block.pool] = after
        block.size, block.next = size, after
        self._at[after.address] = after
        insort(self._free[block.pool], (rest, after.address))

    def _grow(self, size: int, pool: str) -> _Block:
        if self._limit is not None and self.reserved + self._needed(size, pool) > self._limit:
            self._give_back()
        tail = self._tails[pool]
        spare = tail.size if tail is not None and tail.free else 0
        taken = self._needed(size, pool)
        self.reserved += taken
        self.peak = max(self.peak, self.reserved)
        if spare:
            self._unlist(tail)
            tail.size += taken
            return tail
        block = _Block(self._end, taken, pool)
        self._end += 2**50 if self._expandable and tail is None else taken + BLOCK
        if self._expandable:
            if tail is not None:
                block.address = tail.address + tail.size
                block.previous, tail.next = tail, block
            self._tails[pool] = block
        self._at[block.address] = block
        return block

    def _needed(self, size: int, pool: str) -> int:
        """Bytes to take from the device for a request."""
        tail = self._tails[pool]
        spare = tail.size if tail is not None and tail.free else 0
        page = _PAGES[pool] if self._expandable or size < _OWN_SEGMENT else 2 * _MIB
        return -(-(size - spare) // page) * page

    def _give_back(self) -> None:
        """Segments of which every byte is free, or free pages at the end of an expandable one, go back."""
        for pool, free in self._free.items():
            for _, address in list(free):
                block = self._at[address]
                if not self._expandable and block.previous is None and block.next is None:
                    self._remove(block)
                elif self._expandable and block is self._tails[pool]:
                    whole = block.size // _PAGES[pool] * _PAGES[pool]
                    if whole == block.size and block.previous is not None:
                        self._tails[pool] = block.previous
                        block.previous.next = None
                        self._remove(block)
                    elif 0 < whole < block.size:
                        self.reserved -= whole
                        self._unlist(block)
                        block.size -= whole
                        insort(free, (block.size, block.address))

    def _remove(self, block: _Block) -> None:
        self.reserved -= block.size
        self._unlist(block)
        del self._at[block.address]


@dataclass(frozen=True)
class Replay:
    """A job's memory over time.

    Attributes:
        allocated: bytes at most.
        reserved: bytes that the caching allocator takes from the device at most, with expandable segments
            ("expandable") and without ("segments"); those allocated where there is no caching allocator.
        timeline: the highest bytes of equal stretches of time, each with the segment it ended in.
    """

    allocated: int
    reserved: dict[str, int]
    timeline: tuple[tuple[str, int], ...]


def replay(books: Books, period: int, added: int, device: Hardware) -> Replay:
    """Run a job's events through the allocator.

    Args:
        books: of a model with `added` × `period` layers fewer.
    """
    caching = device.backend in ("cuda", "rocm")
    allocators = [CachingAllocator(expandable, device.memory) for expandable in (True, False)] if caching else []
    blocks: dict[tuple[int, int], tuple[list[_Block], int]] = {}
    live, heights, visits = 0, [], []
    for name, size, visit in stretched(books, period, added):
        if size:
            blocks[name] = ([allocator.allocate(size) for allocator in allocators], size)
            live += size
        elif name in blocks:
            taken, size = blocks.pop(name)
            live -= size
            for allocator, block in zip(allocators, taken, strict=True):
                allocator.release(block)
        heights.append(live)
        visits.append(visit)
    highest = max(heights, default=0)
    width = max(1, len(heights) // _POINTS)
    timeline = tuple(
        (books.segment_of_visit[visits[min(at + width, len(visits)) - 1]], max(heights[at : at + width]))
        for at in range(0, len(heights), width)
    )
    peaks = [max(highest, allocator.peak) for allocator in allocators] or [highest, highest]
    return Replay(highest, dict(zip(("expandable", "segments"), peaks, strict=True)), timeline)


def stretched(books: Books, period: int, added: int):
    """The events of a deep model from those of a shallow one: yields (name, bytes, visit), 0 bytes to give it back.

    Layers far from both ends are alike: the n-th allocation in one is the n-th allocation in the next. One period of
    them, the block, is repeated: where a layer gives back what a neighbour took, its copy gives back what the
    neighbour's copy took; outside the layers, an allocation of the block means all of its copies.
    """
    blocks = _blocks(books, period) if added else {}
    place, counterpart = _places(books)

    def named(event: Event, copy: int, block: range | None, here: int | None) -> list[tuple[int, int]]:
        number = event.allocation
        layer = place.get(number)
        home = blocks.get(_stack(layer))
        repeated = home is not None and layer in home
        if block is not None:  # in the block's own stay
            if repeated and home == block:
                return [(number, copy)]
            if _stack(layer) == _stack(block[0]) and layer is not None:
                step = -1 if layer < block[0] else 1
                if 0 <= copy + step <= added and (layer - step * period) in block:
                    return [(counterpart(number, layer - step * period), copy + step)]
            return [(number, 0)]
        if not repeated:
            return [(number, 0)]
        if here is not None and _stack(here) == _stack(layer):  # in a neighbour's stay: the nearest copy
            return [(number, added if here > layer else 0)]
        return [(number, copy) for copy in range(added + 1)]

    layer_before: int | None = None
    for stay in _stays(books.events, blocks):
        here = stay[0].layer
        block = blocks.get(_stack(here))
        block = block if block is not None and here in block else None
        upwards = layer_before is None or block is None or layer_before < block[0]
        for copy in (0,) if block is None else range(added + 1) if upwards else range(added, -1, -1):
            for event in stay:
                for name in named(event, copy, block, here):
                    yield name, event.size, event.visit
        layer_before = here


def _places(books: Books):
    """Of every allocation the layer it belongs to, and how to find the one like it in another layer: the n-th of the
    layer's m-th stay in a segment of that kind."""
    place: dict[int, int] = {}
    like: dict[int, tuple[str, int, int]] = {}
    found: dict[tuple[int, str, int, int], int] = {}
    stays: dict[tuple[int, str], int] = defaultdict(int)
    visit, count, kind = -1, 0, ""
    for event in books.events:
        number, layer = event.allocation, event.layer
        if layer is not None and event.visit != visit:
            visit, count = event.visit, 0
            kind = _POSITION.sub("", books.segment_of_visit[visit])
            stays[layer, kind] += 1
        if not event.size:
            continue
        if layer is not None:
            place[number] = layer
            like[number] = (kind, stays[layer, kind], count)
            found[layer, *like[number]] = number
            count += 1
        elif number in books.layers:
            place[number] = books.layers[number]
    return place, lambda number, layer: found.get((layer, *like.get(number, ("", 0, 0))), number)


def _stack(layer: int | None) -> int | None:
    return None if layer is None else layer // STACK


def _blocks(books: Books, period: int) -> dict[int, range]:
    """Of every stack the layers that are repeated: the period before the last layer."""
    deepest: dict[int, int] = {}
    for event in books.events:
        if event.layer is not None:
            deepest[_stack(event.layer)] = max(deepest.get(_stack(event.layer), 0), event.layer)
    return {stack: range(last - period, last) for stack, last in deepest.items() if last % STACK > period}


def _stays(events: list[Event], blocks: dict[int, range]):
    """Events by stay: in a block of layers, in another layer, or outside."""
    stay: list[Event] = []
    place: object = None
    for event in events:
        block = blocks.get(_stack(event.layer))
        here = block if block is not None and event.layer in block else event.layer
        if stay and here != place:
            yield stay
            stay = []
        place = here
        stay.append(event)
    if stay:
        yield stay

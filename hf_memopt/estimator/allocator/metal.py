"""A model of torch's allocator on MPS, after aten/src/ATen/mps/MPSAllocator.h and .mm (2.13).

Buffers up to 1 MiB lie in Metal heaps of 8 MiB, below 10 MiB in heaps of 32 MiB, below 512 MiB in heaps of 1 GiB, and
larger ones in a heap of their own, rounded to 2 MiB. A freed buffer keeps its place for the next of nearly its size,
and is neither split nor merged; only where a request fits no heap is one that is much too large given up. Heaps are
never returned while a step runs, so what is reserved only grows.

Not modelled: what changes beyond 1.4 × the working set that Metal recommends, where jobs no longer fit.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from hf_memopt.units import MIB

_SMALL = MIB  # kMaxSmallAlloc
_OWN_HEAP = 512 * MIB  # half of kXLargeHeap
_HEAPS = ((_SMALL, 8 * MIB), (10 * MIB - 1, 32 * MIB), (_OWN_HEAP - 1, 1024 * MIB))  # largest buffer, heap
_ROUND = 2 * MIB  # kRoundLarge
_OVERSIZE = 32 * MIB  # kLargeHeap: a cached buffer may be so much larger than a request
_ALIGNMENT = 256  # bytes of a buffer in a heap; assumed, heapBufferSizeAndAlignWithLength decides it


@dataclass(eq=False)
class _Heap:
    """A Metal heap. `gaps`: (offset, size) of what no buffer has."""

    gaps: list[tuple[int, int]]

    @property
    def available(self) -> int:
        """The largest buffer that it takes (maxAvailableSizeWithAlignment)."""
        return max((size for _, size in self.gaps), default=0)

    def place(self, size: int) -> int:
        """The offset of a new buffer, in the first gap that is large enough."""
        at, (offset, gap) = next((at, gap) for at, gap in enumerate(self.gaps) if gap[1] >= size)
        self.gaps[at : at + 1] = [(offset + size, gap - size)] if gap > size else []
        return offset

    def clear(self, offset: int, size: int) -> None:
        """Make a buffer's place a gap, joined with its neighbours."""
        insort(self.gaps, (offset, size))
        joined: list[tuple[int, int]] = []
        for start, length in self.gaps:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self.gaps = joined


@dataclass(frozen=True, eq=False)
class Buffer:
    """A Metal buffer, in use or cached."""

    size: int
    heap: _Heap
    offset: int


@dataclass
class _Pool:
    heaps: list[_Heap] = field(default_factory=list)
    cached: list[Buffer] = field(default_factory=list)  # by size


class MetalAllocator:
    """The allocator's heaps and buffers.

    Attributes:
        peak: bytes that heaps hold, which only grow.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._pools = {"small": _Pool(), "large": _Pool()}

    def allocate(self, size: int) -> Buffer:
        """A buffer of at least `size` bytes."""
        size = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        pool = self._pool(size)
        fitting = bisect_left(pool.cached, size, key=lambda buffer: buffer.size)
        if fitting < len(pool.cached):
            cached = pool.cached[fitting]
            if cached.size <= size + _OVERSIZE:
                return pool.cached.pop(fitting)
            if all(heap.available < size for heap in pool.heaps):
                pool.cached.pop(fitting)
                cached.heap.clear(cached.offset, cached.size)
        heaps = [heap for heap in pool.heaps if heap.available >= size]
        heap = min(heaps, key=lambda heap: heap.available) if heaps else self._new_heap(pool, size)
        return Buffer(size, heap, heap.place(size))

    def release(self, buffer: Buffer) -> None:
        """Return a buffer to the cache."""
        insort(self._pool(buffer.size).cached, buffer, key=lambda cached: cached.size)

    def _pool(self, size: int) -> _Pool:
        return self._pools["small" if size <= _SMALL else "large"]

    def _new_heap(self, pool: _Pool, size: int) -> _Heap:
        total = next((heap for largest, heap in _HEAPS if size <= largest), -(-size // _ROUND) * _ROUND)
        heap = _Heap([(0, total)])
        pool.heaps.append(heap)
        self.peak += total
        return heap

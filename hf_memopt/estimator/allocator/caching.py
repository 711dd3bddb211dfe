"""A model of CUDA's caching allocator, after c10/cuda/CUDACachingAllocator.cpp.

Requests are rounded to 512 bytes. Up to 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB,
larger ones from a segment of their own, rounded to 2 MiB. The smallest free block that is large enough is used, and
split where enough remains; free neighbours are merged. With expandable_segments there is one segment for small and one
for large blocks, which grows at its end.
"""

from bisect import bisect_left, insort

from hf_memopt.estimator.accounting.ledger import BLOCK
from hf_memopt.units import MIB

_SMALL = MIB  # bytes; the largest request that is served from small segments
_PAGES = {"small": 2 * MIB, "large": 20 * MIB}
_OWN_SEGMENT = 10 * MIB  # from this size on a request gets a segment of its own


class Block:
    """A part of a segment, free or allocated; `previous` and `next` are its neighbours in the segment."""

    __slots__ = ("address", "free", "next", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: str):
        self.address, self.size, self.pool = address, size, pool
        self.free, self.previous, self.next = True, None, None


class CachingAllocator:
    """The allocator's segments and blocks, in bytes.

    Attributes:
        reserved: what segments hold now.
        peak: the most that they held.

    Args:
        expandable: expandable_segments is on.
        limit: the device's memory; before exceeding it, the allocator releases free segments.
    """

    def __init__(self, expandable: bool, limit: int | None = None):
        self.reserved = 0
        self.peak = 0
        self._expandable = expandable
        self._limit = limit
        self._free: dict[str, list[tuple[int, int]]] = {"small": [], "large": []}
        self._at: dict[int, Block] = {}
        self._tails: dict[str, Block | None] = {"small": None, "large": None}
        self._end = 0

    def allocate(self, size: int) -> Block:
        """A block of at least `size` bytes."""
        size = -(-max(size, 1) // BLOCK) * BLOCK
        pool = "small" if size <= _SMALL else "large"
        free = self._free[pool]
        fitting = bisect_left(free, (size, -1))
        block = self._at[free.pop(fitting)[1]] if fitting < len(free) else self._grow(size, pool)
        block.free = False
        self._split(block, size)
        return block

    def release(self, block: Block) -> None:
        """Return a block to the cache, merged with free neighbours."""
        block.free = True
        before, after = block.previous, block.next
        if after is not None and after.free:
            self._merge(block, after)
        if before is not None and before.free:
            self._unlist(before)
            self._merge(before, block, listed=False)
            block = before
        insort(self._free[block.pool], (block.size, block.address))

    def _merge(self, first: Block, second: Block, listed: bool = True) -> None:
        """Make the second block, which follows the first, a part of it."""
        if listed:
            self._unlist(second)
        first.size += second.size
        first.next = second.next
        self._take_place(first, second)
        del self._at[second.address]

    def _take_place(self, block: Block, other: Block) -> None:
        """Put a block in the place of another before the next one, or at the end of the segment."""
        if other.next is not None:
            other.next.previous = block
        if self._tails[block.pool] is other:
            self._tails[block.pool] = block

    def _unlist(self, block: Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect_left(free, (block.size, block.address)))

    def _split(self, block: Block, size: int) -> None:
        remainder = block.size - size
        if remainder < (BLOCK if block.pool == "small" or self._expandable else _SMALL + 1):
            return
        after = Block(block.address + size, remainder, block.pool)
        after.previous, after.next = block, block.next
        self._take_place(after, block)
        block.size, block.next = size, after
        self._at[after.address] = after
        insort(self._free[block.pool], (remainder, after.address))

    def _grow(self, size: int, pool: str) -> Block:
        if self._limit is not None and self.reserved + self._needed(size, pool) > self._limit:
            self._release_cached()
        tail = self._tails[pool]
        added = self._needed(size, pool)
        self.reserved += added
        self.peak = max(self.peak, self.reserved)
        if tail is not None and tail.free:
            self._unlist(tail)
            tail.size += added
            return tail
        block = Block(self._end, added, pool)
        self._end += 2**50 if self._expandable and tail is None else added + BLOCK
        if self._expandable:
            if tail is not None:
                block.address = tail.address + tail.size
                block.previous, tail.next = tail, block
            self._tails[pool] = block
        self._at[block.address] = block
        return block

    def _needed(self, size: int, pool: str) -> int:
        """Bytes to reserve for a request."""
        tail = self._tails[pool]
        spare = tail.size if tail is not None and tail.free else 0
        page = _PAGES[pool] if self._expandable or size < _OWN_SEGMENT else 2 * MIB
        return -(-(size - spare) // page) * page

    def _release_cached(self) -> None:
        """Release segments without an allocated block, or the free pages at the end of an expandable one."""
        for pool, free in self._free.items():
            for _, address in list(free):
                block = self._at[address]
                if not self._expandable and block.previous is None and block.next is None:
                    self._remove(block)
                elif self._expandable and block is self._tails[pool]:
                    released = block.size // _PAGES[pool] * _PAGES[pool]
                    if released == block.size and block.previous is not None:
                        self._tails[pool] = block.previous
                        block.previous.next = None
                        self._remove(block)
                    elif 0 < released < block.size:
                        self.reserved -= released
                        self._unlist(block)
                        block.size -= released
                        insort(free, (block.size, block.address))

    def _remove(self, block: Block) -> None:
        self.reserved -= block.size
        self._unlist(block)
        del self._at[block.address]

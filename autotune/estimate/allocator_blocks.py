"""Blocks of torch's caching allocator, and the pools of those that are free."""

from __future__ import annotations

from bisect import bisect_left, insort

from autotune.core.units import MIB

SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
"""Segments of the two kinds of pools, and pages of their expandable segments."""

# States of a block. Plain integers: they are compared for every request of a replay.
IN_USE = 0
FREE = 1
UNMAPPED = 2


class AllocatorBlock:
    """Address range of one segment, linked to its neighbours."""

    __slots__ = ("address", "after", "before", "pool", "size", "state")

    def __init__(
        self,
        address: int,
        size: int,
        state: int,
        pool: Pool,
    ) -> None:
        self.address = address
        self.size = size
        self.state = state
        self.pool = pool
        self.before: AllocatorBlock | None = None
        self.after: AllocatorBlock | None = None

    @property
    def growable_size(self) -> int:
        """Size that a block of an expandable segment can reach."""
        if self.after is None or self.after.state != UNMAPPED:
            return self.size
        return self.size + self.after.size


class Pool:
    """Free blocks of one stream and kind, ordered by (size, address)."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page_bytes = SMALL_SEGMENT if small else LARGE_SEGMENT  # unit of an expandable segment
        self.free: list[tuple[int, int, AllocatorBlock]] = []
        self.first: AllocatorBlock | None = None  # of the expandable segment

    def add(self, block: AllocatorBlock) -> None:
        block.state = FREE
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: AllocatorBlock) -> None:
        # A shorter tuple sorts before its extension.
        self.free.pop(bisect_left(self.free, (block.size, block.address)))

    def take_in_neighbours(self, block: AllocatorBlock) -> None:
        """Merge free neighbours into the block."""
        before = block.before
        if before is not None and before.state == FREE:
            self.remove(before)
            join(block, before, self)
        after = block.after
        if after is not None and after.state == FREE:
            self.remove(after)
            join(block, after, self)

    def whole_pages(self, size: int) -> int:
        """Return the size rounded up to pages of an expandable segment."""
        return -(-size // self.page_bytes) * self.page_bytes


def free_size(block: AllocatorBlock | None) -> int:
    if block is None or block.state != FREE:
        return 0
    return block.size


def cut(block: AllocatorBlock, size: int) -> AllocatorBlock:
    """Shrink the block to `size` bytes; return the rest, linked behind it."""
    remainder = AllocatorBlock(block.address + size, block.size - size, block.state, block.pool)
    remainder.before = block
    remainder.after = block.after
    if block.after is not None:
        block.after.before = remainder
    block.after = remainder
    block.size = size
    return remainder


def join(
    block: AllocatorBlock,
    neighbour: AllocatorBlock,
    pool: Pool,
) -> None:
    """Merge the neighbour into the block."""
    if neighbour is block.before:
        block.address = neighbour.address
        block.before = neighbour.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block
    block.size += neighbour.size
    if pool.first is neighbour:
        pool.first = block

"""torch's caching allocator, replayed: what a sequence of requests makes it allocate and reserve.

The rules are those of torch's native CUDA allocator. Each stream has pools of its own: a block given back on one serves no
other. Three figures have to be told apart, as torch does:

- requested: what the operations asked for;
- allocated: the blocks that were handed out for it. A block is its request rounded up to 512 bytes, or somewhat larger
  where the remainder was too small to be split off. `torch.cuda.max_memory_allocated` is the peak of this one;
- reserved: the segments that were taken from the driver, cached blocks among them. `torch.cuda.max_memory_reserved`.

A memory fraction (`set_per_process_memory_fraction`) acts like a smaller device: give it as the capacity. The garbage
collection that goes with it (`garbage_collection_threshold`) is not followed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.units import MIB

MIN_BLOCK = 512
"""Every request is rounded up to a multiple of it."""

SMALL_REQUEST = MIB
"""Requests up to here live in the small pool."""

SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
"""A segment for requests that are not small and below `EXACT_FROM`."""

EXACT_FROM = 10 * MIB
"""From here on a segment is made for one request, rounded up to `SEGMENT_ROUNDING`."""

SEGMENT_ROUNDING = 2 * MIB
LEAST_LARGE_REMAINDER = MIB
"""In the large pool a remainder must exceed it to be split off, unless segments are expandable."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Of `PYTORCH_CUDA_ALLOC_CONF`, what changes where blocks go."""

    expandable_segments: bool = False
    """One growing segment per pool, mapped page by page, in place of many fixed ones."""

    max_split_bytes: int | None = None
    """Blocks from this size on are never split, and serve no smaller request."""

    @classmethod
    def of(cls, text: str) -> AllocatorSettings:
        """From `PYTORCH_CUDA_ALLOC_CONF`'s text. What it names beyond these two is not followed."""
        given = dict(part.strip().split(":", 1) for part in text.split(",") if ":" in part)
        split = given.get("max_split_size_mb", "").strip()
        return cls(
            expandable_segments=given.get("expandable_segments", "").strip().lower() in ("true", "1"),
            max_split_bytes=int(split) * MIB if split.isdigit() else None,
        )


class OutOfMemory(Exception):
    """The device has no room for a segment, even after all cached blocks were given back."""

    def __init__(self, *, asked_bytes: int, reserved_bytes: int, allocated_bytes: int) -> None:
        super().__init__(f"asked for {asked_bytes} with {reserved_bytes} reserved and {allocated_bytes} allocated")
        self.asked_bytes, self.reserved_bytes, self.allocated_bytes = asked_bytes, reserved_bytes, allocated_bytes


IN_USE, FREE, UNMAPPED = range(3)


class Block:
    """A stretch of one segment's addresses."""

    __slots__ = ("address", "after", "before", "pool", "size", "state")

    def __init__(self, address: int, size: int, state: int, pool: Pool) -> None:
        self.address, self.size, self.state, self.pool = address, size, state, pool
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        return self.before is None and self.after is None


class Pool:
    """The free blocks of one kind, smallest first, by address among equals; and an expandable segment's first block."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, Block]] = []
        self.first: Block | None = None

    def add(self, block: Block) -> None:
        block.state = FREE
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        self.free.pop(bisect_left(self.free, (block.size, block.address)))  # a shorter tuple sorts before its extension

    def unmapped(self) -> Iterator[Block]:
        """Lowest address first."""
        block = self.first
        while block is not None:
            if block.state == UNMAPPED:
                yield block
            block = block.after


class CachingAllocator:
    """Takes requests and returns; knows what it holds. `capacity_bytes` is what the driver can give it, None for no end."""

    def __init__(self, settings: AllocatorSettings | None = None, *, capacity_bytes: int | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity_bytes = capacity_bytes
        self.requested = self.allocated = self.reserved = 0
        self.retries = 0
        """How often the cache had to be given back to go on: torch's `num_alloc_retries`."""

        self._pools: dict[int, tuple[Pool, Pool]] = {}
        """By stream, the one of large blocks and the one of small blocks."""

        self._in_use: dict[int, tuple[Block, int]] = {}
        self._waiting: dict[int, Block] = {}
        self._next_address = 0
        self._max_split = self.settings.max_split_bytes or (1 << 62)

    def malloc(self, number: int, size: int, stream: int = 0) -> None:
        """Request `size` bytes, to be given back under this number."""
        if size == 0:
            return  # torch hands out no block for nothing
        rounded = -(-size // MIN_BLOCK) * MIN_BLOCK
        pools = self._pools.get(stream) or self._pools.setdefault(stream, (Pool(small=False), Pool(small=True)))
        pool = pools[rounded <= SMALL_REQUEST]
        block = self._cached(pool, rounded) or self._fresh(pool, rounded)
        if self._splits(block, rounded):
            self._split(pool, block, rounded)
        block.state = IN_USE
        self._in_use[number] = (block, size)
        self.requested += size
        self.allocated += block.size

    def free(self, number: int) -> None:
        """Give it back: to the cache, joined with free neighbours."""
        block = self._no_longer_used(number)
        if block is not None:
            self._to_the_cache(block)

    def let_go(self, number: int) -> None:
        """Give it back while another stream may still read it: not allocated any more, and of no use until it `comes_back`."""
        block = self._no_longer_used(number)
        if block is not None:
            self._waiting[number] = block

    def comes_back(self, number: int) -> None:
        """The other stream has passed."""
        if number in self._waiting:
            self._to_the_cache(self._waiting.pop(number))

    def _no_longer_used(self, number: int) -> Block | None:
        if number not in self._in_use:
            return None
        block, size = self._in_use.pop(number)
        self.requested -= size
        self.allocated -= block.size
        return block

    def _to_the_cache(self, block: Block) -> None:
        pool = block.pool
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.state == FREE:
                pool.remove(neighbour)
                _join(block, neighbour, pool)
        pool.add(block)

    def empty_cache(self) -> None:
        """Give every unused segment (of an expandable one, every unused page) back to the driver, when all streams passed."""
        for number in list(self._waiting):
            self.comes_back(number)
        for pool in [pool for pools in self._pools.values() for pool in pools]:
            for _, _, block in list(pool.free):
                if self.settings.expandable_segments:
                    self._unmap(pool, block)
                elif block.is_whole_segment:
                    pool.remove(block)
                    self.reserved -= block.size

    # Finding room.

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block that is large enough."""
        at = bisect_left(pool.free, (size,))
        if at == len(pool.free):
            return None
        if self.settings.expandable_segments:
            at = self._rather_not_the_growing_one(pool, at)
        found = pool.free[at][2]
        if size < self._max_split <= found.size:
            return None
        if size >= self._max_split and found.size >= size + LARGE_SEGMENT:
            return None
        del pool.free[at]
        return found

    def _rather_not_the_growing_one(self, pool: Pool, at: int) -> int:
        """A free block that can still grow counts as being as large as it could become."""
        while at + 1 < len(pool.free) and _could_be(pool.free[at + 1][2]) < _could_be(pool.free[at][2]):
            at += 1
        return at

    def _fresh(self, pool: Pool, size: int) -> Block:
        if self.settings.expandable_segments:
            return self._grown(pool, size)
        segment = _segment_for(size)
        if not self._take(segment) and not (self._released_oversized(pool, size) and self._take(segment)):
            self._retry(segment, asked=size)
        block = Block(self._next_address, segment, FREE, pool)
        self._next_address += segment
        return block

    def _take(self, size: int) -> bool:
        if self.capacity_bytes is not None and self.reserved + size > self.capacity_bytes:
            return False
        self.reserved += size
        return True

    def _retry(self, segment: int, *, asked: int) -> None:
        self.empty_cache()
        self.retries += 1
        if not self._take(segment):
            raise OutOfMemory(asked_bytes=asked, reserved_bytes=self.reserved, allocated_bytes=self.allocated)

    def _released_oversized(self, pool: Pool, size: int) -> bool:
        """With a largest split size, unsplittable cached blocks go first: the smallest that suffices, else the largest ones."""
        if self.settings.max_split_bytes is None:
            return False
        wanted = max(size, self._max_split)
        at = bisect_left(pool.free, (wanted,))
        if at < len(pool.free):
            self._release(pool, pool.free[at][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= self._max_split:
            released += pool.free[-1][0]
            self._release(pool, pool.free[-1][2])
        return released >= wanted

    def _release(self, pool: Pool, block: Block) -> None:
        pool.remove(block)
        self.reserved -= block.size

    def _splits(self, block: Block, size: int) -> bool:
        remainder = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            return remainder >= MIN_BLOCK
        return size < self._max_split and remainder > LEAST_LARGE_REMAINDER

    def _split(self, pool: Pool, block: Block, size: int) -> None:
        """Keep the front, put the rest into the pool."""
        rest = _cut(block, size)
        pool.add(rest)

    # Expandable segments.

    def _grown(self, pool: Pool, size: int) -> Block:
        """A free block that was made large enough by mapping the pages behind it."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        block, missing = self._place_to_grow(pool, size)
        pages = -(-missing // page) * page
        if not self._take(pages):
            self._retry_grown(pool, size)
            return self._grown(pool, size)
        return self._mapped(pool, block, pages)

    def _retry_grown(self, pool: Pool, size: int) -> None:
        """Give all unused pages back, and see whether there is room now; the place to grow may be another one then."""
        self.empty_cache()
        self.retries += 1
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        _, missing = self._place_to_grow(pool, size)
        pages = -(-missing // page) * page
        if self.capacity_bytes is not None and self.reserved + pages > self.capacity_bytes:
            raise OutOfMemory(asked_bytes=size, reserved_bytes=self.reserved, allocated_bytes=self.allocated)

    def _place_to_grow(self, pool: Pool, size: int) -> tuple[Block, int]:
        """The first unmapped stretch that is long enough, with the free block before it, and how much of it must be mapped."""
        if pool.first is None:
            pool.first = Block(0, 1 << 50, UNMAPPED, pool)  # more addresses than any device has memory
        for stretch in pool.unmapped():
            held = stretch.before.size if stretch.before is not None and stretch.before.state == FREE else 0
            behind = stretch.after.size if stretch.after is not None and stretch.after.state == FREE else 0
            if held + stretch.size + behind >= size:
                return stretch, min(size - held, stretch.size)
        raise AssertionError("the last stretch of addresses has no end")

    def _mapped(self, pool: Pool, stretch: Block, pages: int) -> Block:
        if stretch.size > pages:
            _cut(stretch, pages).state = UNMAPPED
        for neighbour in (stretch.before, stretch.after):
            if neighbour is not None and neighbour.state == FREE:
                pool.remove(neighbour)
                _join(stretch, neighbour, pool)
        return stretch

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Only whole pages can be given back: what lies before and after them stays free."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if end <= start:
            return
        pool.remove(block)
        middle = block
        if start > block.address:
            middle = _cut(block, start - block.address)
            pool.add(block)
        if middle.address + middle.size > end:
            pool.add(_cut(middle, end - middle.address))
        middle.state = UNMAPPED
        self.reserved -= middle.size
        for neighbour in (middle.before, middle.after):
            if neighbour is not None and neighbour.state == UNMAPPED:
                _join(middle, neighbour, pool)


def _segment_for(size: int) -> int:
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < EXACT_FROM:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


def _could_be(block: Block) -> int:
    growing = block.after is not None and block.after.state == UNMAPPED
    return block.size + (block.after.size if growing and block.after is not None else 0)


def _cut(block: Block, size: int) -> Block:
    """Leaves `size` bytes in the block; gives the rest, linked behind it."""
    rest = Block(block.address + size, block.size - size, block.state, block.pool)
    rest.before, rest.after = block, block.after
    if block.after is not None:
        block.after.before = rest
    block.after, block.size = rest, size
    return rest


def _join(block: Block, neighbour: Block, pool: Pool) -> None:
    """The neighbour becomes part of the block."""
    if neighbour is block.before:
        block.address, block.before = neighbour.address, neighbour.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block
    block.size += neighbour.size
    if pool.first is neighbour:
        pool.first = block

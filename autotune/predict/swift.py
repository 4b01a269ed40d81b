"""The allocator once more, in a form that compiles: thousands of traces in the time of a few.

`allocator.CachingAllocator` is the readable one and knows all settings; this one knows torch's default settings, and a test
holds the two against each other.
"""

from __future__ import annotations

import numpy as np

from autotune.predict.allocator import (
    EXACT_FROM,
    LARGE_SEGMENT,
    LEAST_LARGE_REMAINDER,
    MIN_BLOCK,
    SEGMENT_ROUNDING,
    SMALL_REQUEST,
    SMALL_SEGMENT,
)
from autotune.predict.compiled import compiled, uncounted
from autotune.predict.course import NONE, Course, Integers, Walked

IN_USE, FREE = 0, 1

Heap = tuple[Integers, Integers]
"""Blocks, and lists of their numbers. Only two arrays: numba hands every one over at every call."""

ADDRESS, SIZE, STATE, BEFORE, AFTER, POOL = range(6)
"""Columns of the blocks: what lies before and after them in their segment are numbers of blocks."""

BOOKS, LENGTHS, SPARE, POOLS = range(4)
"""Rows of the lists: figures; by pool, how many blocks are free; numbers that no block has; and from here on by pool the free
blocks, smallest first, by address among equals."""

REQUESTED, ALLOCATED, RESERVED, ADDRESSES, RETRIES, SPARES, ROOM, ASKED = range(8)
"""Places in the books."""


BLOCKS = 4096
"""At first: setting up more than are needed takes longer than walking."""

MOST_BYTES = 1 << 62
"""In all: what is more does not add up any more."""


def walk(course: Course, sizes: Integers, rows: int, capacity: int | None) -> Walked:
    """The peaks of every row. The course is a sound one; IndexError for sizes that are none."""
    if len(sizes) != len(course.streams) or sizes.min(initial=0) < 0 or sizes.sum(dtype=np.float64) > MOST_BYTES:
        raise IndexError("these sizes are not those of the course's allocations")
    sizes = np.ascontiguousarray(sizes, dtype=np.int64)
    blocks = BLOCKS
    while True:  # once more with more blocks, where they did not suffice
        walked = _walked(course, sizes, rows, blocks, NONE if capacity is None else capacity)
        if walked.books[SPARES] >= 0:
            return walked
        blocks *= 4


def _walked(course: Course, sizes: Integers, rows: int, most: int, room: int) -> Walked:
    """With room for so many blocks. All arrays are held here while the walk goes on."""
    pools = 2 * (1 + int(course.streams.max(initial=0)))
    blocks, lists = np.zeros((most, 6), dtype=np.int64), np.zeros((POOLS + pools, max(most, pools)), dtype=np.int64)
    lists[BOOKS, SPARES], lists[BOOKS, ROOM] = most, room
    lists[SPARE, :most] = np.arange(most)
    holder = np.full(len(sizes), NONE, dtype=np.int64)
    waiting = np.zeros(len(sizes) if course.waits.max(initial=NONE) > NONE else 0, dtype=np.int64)
    peaks, seen = np.zeros((rows + 1, 4), dtype=np.int64), np.zeros(rows + 1, dtype=np.int64)
    peaks[:, 3] = NONE
    ran = bool(_walk(*course, sizes, blocks, lists, holder, waiting, peaks, seen))
    return Walked(peaks, seen, lists[BOOKS, : ASKED + 1].copy(), ran)


@compiled
def _place(heap: Heap, pool: int, size: int, address: int) -> int:
    """The first place in a pool's list that is not below this one."""
    blocks, lists = heap
    low, high = 0, lists[LENGTHS, pool]
    while low < high:
        middle = (low + high) // 2
        block = lists[POOLS + pool, middle]
        if blocks[block, SIZE] < size or (blocks[block, SIZE] == size and blocks[block, ADDRESS] < address):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _take_out(heap: Heap, pool: int, place: int) -> None:
    _, lists = heap
    for at in range(place, lists[LENGTHS, pool] - 1):
        lists[POOLS + pool, at] = lists[POOLS + pool, at + 1]
    lists[LENGTHS, pool] -= 1


@compiled
def _put_in(heap: Heap, block: int) -> None:
    blocks, lists = heap
    pool = blocks[block, POOL]
    blocks[block, STATE] = FREE
    place = _place(heap, pool, blocks[block, SIZE], blocks[block, ADDRESS])
    for at in range(lists[LENGTHS, pool], place, -1):
        lists[POOLS + pool, at] = lists[POOLS + pool, at - 1]
    lists[POOLS + pool, place] = block
    lists[LENGTHS, pool] += 1


@compiled
def _new_block(heap: Heap, address: int, size: int, pool: int) -> int:
    blocks, lists = heap
    lists[BOOKS, SPARES] -= 1
    block = lists[SPARE, lists[BOOKS, SPARES]]
    blocks[block, ADDRESS], blocks[block, SIZE], blocks[block, POOL] = address, size, pool
    blocks[block, BEFORE], blocks[block, AFTER] = NONE, NONE
    return int(block)


@compiled
def _no_block(heap: Heap, block: int) -> None:
    _, lists = heap
    lists[SPARE, lists[BOOKS, SPARES]] = block
    lists[BOOKS, SPARES] += 1


@compiled
def _shrink_into(heap: Heap, place: int, rest: int) -> None:
    """What is left of a free block takes its place in the list, or one below: most often none has to make way."""
    blocks, lists = heap
    pool = blocks[rest, POOL]
    blocks[rest, STATE] = FREE
    size, address, at = blocks[rest, SIZE], blocks[rest, ADDRESS], place
    while at > 0:
        below = lists[POOLS + pool, at - 1]
        if blocks[below, SIZE] < size or (blocks[below, SIZE] == size and blocks[below, ADDRESS] < address):
            break
        lists[POOLS + pool, at] = below
        at -= 1
    lists[POOLS + pool, at] = rest


@compiled
def _grow_into(heap: Heap, place: int, block: int) -> None:
    """A block that has taken in the free one at this place takes its place in the list, or one above."""
    blocks, lists = heap
    pool = blocks[block, POOL]
    blocks[block, STATE] = FREE
    size, address, last = blocks[block, SIZE], blocks[block, ADDRESS], lists[LENGTHS, pool] - 1
    at = place
    while at < last:
        above = lists[POOLS + pool, at + 1]
        if blocks[above, SIZE] > size or (blocks[above, SIZE] == size and blocks[above, ADDRESS] > address):
            break
        lists[POOLS + pool, at] = above
        at += 1
    lists[POOLS + pool, at] = block


@compiled
def _place_of(heap: Heap, block: int) -> int:
    blocks, _ = heap
    return _place(heap, blocks[block, POOL], blocks[block, SIZE], blocks[block, ADDRESS])


@compiled
def _absorb(heap: Heap, block: int, other: int) -> None:
    """A free neighbour, which is in no list any more, becomes part of the block."""
    blocks, _ = heap
    if other == blocks[block, BEFORE]:
        blocks[block, ADDRESS], blocks[block, BEFORE] = blocks[other, ADDRESS], blocks[other, BEFORE]
        if blocks[block, BEFORE] != NONE:
            blocks[blocks[block, BEFORE], AFTER] = block
    else:
        blocks[block, AFTER] = blocks[other, AFTER]
        if blocks[block, AFTER] != NONE:
            blocks[blocks[block, AFTER], BEFORE] = block
    blocks[block, SIZE] += blocks[other, SIZE]
    _no_block(heap, other)


@compiled
def _to_the_cache(heap: Heap, block: int) -> None:
    blocks, _ = heap
    before, after = blocks[block, BEFORE], blocks[block, AFTER]
    place = NONE
    if before != NONE and blocks[before, STATE] == FREE:
        place = _place_of(heap, before)
        _absorb(heap, block, before)
    if after != NONE and blocks[after, STATE] == FREE:
        later = _place_of(heap, after)
        _absorb(heap, block, after)
        if place == NONE:
            place = later
        else:  # two become one
            _take_out(heap, blocks[block, POOL], max(place, later))
            place = min(place, later)
    if place == NONE:
        _put_in(heap, block)
    else:
        _grow_into(heap, place, block)


@compiled
def _empty_cache(heap: Heap, holder: Integers, waiting: Integers) -> None:
    """Every unused segment goes back to the driver, when all streams have passed."""
    blocks, lists = heap
    for number in range(len(waiting)):
        _come_back(heap, holder, waiting, number)
    for pool in range(len(lists) - POOLS):
        kept = 0
        for place in range(lists[LENGTHS, pool]):
            block = lists[POOLS + pool, place]
            if blocks[block, BEFORE] == NONE and blocks[block, AFTER] == NONE:
                lists[BOOKS, RESERVED] -= blocks[block, SIZE]
                _no_block(heap, block)
            else:
                lists[POOLS + pool, kept] = block
                kept += 1
        lists[LENGTHS, pool] = kept


@compiled
def _come_back(heap: Heap, holder: Integers, waiting: Integers, number: int) -> None:
    """Another stream has passed."""
    if waiting[number]:
        waiting[number] = 0
        _to_the_cache(heap, holder[number])


@compiled
def _segment(size: int) -> int:
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < EXACT_FROM:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


@compiled
def _fresh(heap: Heap, holder: Integers, waiting: Integers, pool: int, size: int) -> int:
    """A block of a new segment, with the cache given back for it where it must be; -1 where there is no room even then."""
    _, lists = heap
    segment, room = _segment(size), lists[BOOKS, ROOM]
    if room != NONE and lists[BOOKS, RESERVED] + segment > room:
        _empty_cache(heap, holder, waiting)
        lists[BOOKS, RETRIES] += 1
        if lists[BOOKS, RESERVED] + segment > room:
            lists[BOOKS, ASKED] = size
            return NONE
    lists[BOOKS, RESERVED] += segment
    block = _new_block(heap, lists[BOOKS, ADDRESSES], segment, pool)
    lists[BOOKS, ADDRESSES] += segment
    return block


@compiled
def _cut(heap: Heap, block: int, size: int) -> int:
    """The block's rest, which is a block of its own from now on, in no list yet."""
    blocks, _ = heap
    rest = _new_block(heap, blocks[block, ADDRESS] + size, blocks[block, SIZE] - size, blocks[block, POOL])
    blocks[rest, BEFORE], blocks[rest, AFTER] = block, blocks[block, AFTER]
    if blocks[block, AFTER] != NONE:
        blocks[blocks[block, AFTER], BEFORE] = rest
    blocks[block, AFTER], blocks[block, SIZE] = rest, size
    return rest


@compiled
def _is_cut(whole: int, size: int) -> bool:
    """Whether a block of this size is split for so much."""
    rest = whole - size
    return rest >= MIN_BLOCK if size <= SMALL_REQUEST else rest > LEAST_LARGE_REMAINDER


@compiled
def _malloc(heap: Heap, holder: Integers, waiting: Integers, number: int, request: int, stream: int) -> bool:
    """Whether there was room."""
    blocks, lists = heap
    if lists[BOOKS, SPARES] < 2:
        lists[BOOKS, SPARES] = NONE
        return False
    size = -(-request // MIN_BLOCK) * MIN_BLOCK
    pool = 2 * stream + (1 if size <= SMALL_REQUEST else 0)
    place = _place(heap, pool, size, NONE)  # of the smallest free block that is large enough
    if place == lists[LENGTHS, pool]:
        block = _fresh(heap, holder, waiting, pool, size)
        if block == NONE:
            return False
        if _is_cut(blocks[block, SIZE], size):
            _put_in(heap, _cut(heap, block, size))
    else:
        block = lists[POOLS + pool, place]
        if _is_cut(blocks[block, SIZE], size):
            _shrink_into(heap, place, _cut(heap, block, size))
        else:
            _take_out(heap, pool, place)
    blocks[block, STATE] = IN_USE
    holder[number] = block
    lists[BOOKS, REQUESTED] += request
    lists[BOOKS, ALLOCATED] += blocks[block, SIZE]
    return True


@compiled
def _note(peaks: Integers, row: int, lists: Integers, event: int) -> None:
    if lists[BOOKS, ALLOCATED] > peaks[row, 1]:
        peaks[row, 1], peaks[row, 3] = lists[BOOKS, ALLOCATED], event
    peaks[row, 0] = max(peaks[row, 0], lists[BOOKS, REQUESTED])
    peaks[row, 2] = max(peaks[row, 2], lists[BOOKS, RESERVED])


@compiled
def _due(waits: Integers) -> tuple[Integers, Integers]:
    """For each allocation the first of those that come back before it, and for each of those the next. What waits for one
    beyond the last is never back."""
    due, following = np.full(len(waits), NONE), np.full(len(waits), NONE)
    for number in range(len(waits) - 1, -1, -1):
        if NONE != waits[number] < len(waits):
            following[number] = due[waits[number]]
            due[waits[number]] = number
    return due, following


@compiled
def _walk(
    events: Integers,
    starts: Integers,
    belongs: Integers,
    emptied: Integers,
    looked: int,
    streams: Integers,
    waits: Integers,
    requests: Integers,
    blocks: Integers,
    lists: Integers,
    holder: Integers,
    waiting: Integers,
    peaks: Integers,
    seen: Integers,
) -> bool:
    """Whether there was room for all of it. What is handed on at each event is handed on uncounted."""
    blocks, lists = heap = uncounted(blocks), uncounted(lists)
    holder, waiting, peaks = uncounted(holder), uncounted(waiting), uncounted(peaks)
    rows, several = len(seen) - 1, len(waiting) > 0
    due, following = _due(waits if several else waits[:0])
    for stretch in range(len(starts)):
        start = starts[stretch]
        if stretch < len(belongs) and emptied[stretch]:
            _empty_cache(heap, holder, waiting)
        if stretch == looked:
            seen[rows] = 1
            _note(peaks, rows, lists, start - 1)
        if stretch == len(belongs):
            break
        row = belongs[stretch]
        seen[row] = 1
        _note(peaks, row, lists, start - 1)
        for at in range(start, starts[stretch + 1]):
            number = abs(events[at]) - 1
            if events[at] < 0:
                if holder[number] == NONE:
                    continue
                lists[BOOKS, REQUESTED] -= requests[number]
                lists[BOOKS, ALLOCATED] -= blocks[holder[number], SIZE]
                if waits[number] != NONE:
                    waiting[number] = 1
                else:
                    _to_the_cache(heap, holder[number])
                continue
            back = due[number] if several else NONE
            while back != NONE:
                _come_back(heap, holder, waiting, back)
                back = following[back]
            if requests[number] and not _malloc(heap, holder, waiting, number, requests[number], streams[number]):
                return False
            _note(peaks, row, lists, at)
    return True

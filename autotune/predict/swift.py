"""The allocator once more, in a form that compiles: thousands of traces in the time of a few.

`allocator.CachingAllocator` is the readable one and knows all settings; this one knows torch's default settings, and a test
holds the two against each other. numba compiles it and keeps the result on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from autotune.predict.allocator import (
    EXACT_FROM,
    LARGE_SEGMENT,
    LEAST_LARGE_REMAINDER,
    MIN_BLOCK,
    SEGMENT_ROUNDING,
    SMALL_REQUEST,
    SMALL_SEGMENT,
)

try:
    import numba
except ImportError:  # then the readable one does it all
    numba = None

Integers = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])

IN_USE, FREE = 0, 1
NONE = -1
REQUESTED, ALLOCATED, RESERVED, ADDRESS, RETRIES, SPARES, ROOM, ASKED = range(8)
"""Places in the books."""


BLOCKS = 4096
"""At first: setting up more than are needed takes longer than walking."""

MOST_BYTES = 1 << 62
"""In all: what is more does not add up any more."""


class Course(NamedTuple):
    """Events and where they belong."""

    events: Integers
    starts: Integers
    """Of each stretch, its first event; one more entry for the end."""

    belongs: Integers
    """Of each stretch, the row that its peaks go into."""

    emptied: Integers
    """Of each stretch, whether the cache is given back before it."""

    looked: int
    """The stretch before which a look is taken at what is held, the one behind the last for the end; -1 for none."""

    streams: Integers
    """Of each allocation."""

    waits: Integers
    """Of each allocation, the one before which it is free again on its own stream; -1 where it is so at once."""


class Heap(NamedTuple):
    """Blocks, each a number: where they are, what lies before and after them in their segment, and the lists of free ones."""

    address: Integers
    size: Integers
    state: Integers
    before: Integers
    after: Integers
    pool: Integers
    free: Integers
    """By pool: free blocks, smallest first, by address among equals."""

    lengths: Integers
    spare: Integers
    """Numbers that no block has."""

    holder: Integers
    """Of each allocation, its block."""

    waiting: Integers
    """Of each allocation, whether it was given back and another stream may still read it."""

    books: Integers


class Walked(NamedTuple):
    """What was held."""

    peaks: Integers
    """Of each row: requested, allocated and reserved bytes, and the event of the second; the last row is the look's."""

    seen: Integers
    """Whether a row's stretches were reached."""

    books: Integers
    """As they were left."""

    ran: bool
    """Whether there was room for all of it."""


def is_there() -> bool:
    return numba is not None


def walk(course: Course, sizes: Integers, rows: int, capacity: int | None) -> Walked:
    """The peaks of every row. The course is a sound one; IndexError for sizes that are none."""
    if len(sizes) != len(course.streams) or sizes.min(initial=0) < 0 or sizes.sum(dtype=np.float64) > MOST_BYTES:
        raise IndexError("these sizes are not those of the course's allocations")
    blocks = BLOCKS
    while True:  # once more with more blocks, where they did not suffice
        walked = Walked(*_walk(*course, sizes, rows, blocks, NONE if capacity is None else capacity))
        if walked.books[SPARES] >= 0:
            return walked
        blocks *= 4


def require_sound(course: Course, rows: int) -> None:
    """IndexError for what would end in somebody else's memory: the compiled walk looks at no bounds."""
    count, numbers = len(course.streams), np.abs(course.events) - 1
    if (numbers < 0).any() or (numbers >= count).any() or len(course.waits) != count:
        raise IndexError("an event makes or gives back what is no allocation")
    if len(np.unique(course.events)) < len(course.events):
        raise IndexError("an allocation is made twice, or given back twice")
    if (course.streams < 0).any() or (course.waits < NONE).any():
        raise IndexError("an allocation is on no stream, or waits for none that there is")
    if not len(course.belongs) == len(course.emptied) == len(course.starts) - 1:
        raise IndexError("not every stretch says where it belongs")
    if (np.diff(course.starts, prepend=0, append=len(course.events)) < 0).any():
        raise IndexError("a stretch lies outside of the events")
    if (course.belongs < 0).any() or (course.belongs >= rows).any():
        raise IndexError("a stretch belongs to no row")


def _compiled(function: Function) -> Function:
    """Without a check at each access, which takes twice as long as all the rest: `require_sound` and `walk` look before."""
    return function if numba is None else numba.njit(cache=True, nogil=True)(function)


@_compiled
def _place(heap: Heap, pool: int, size: int, address: int) -> int:
    """The first place in a pool's list that is not below this one."""
    low, high = 0, heap.lengths[pool]
    while low < high:
        middle = (low + high) // 2
        block = heap.free[pool, middle]
        if heap.size[block] < size or (heap.size[block] == size and heap.address[block] < address):
            low = middle + 1
        else:
            high = middle
    return low


@_compiled
def _take_out(heap: Heap, pool: int, place: int) -> None:
    for at in range(place, heap.lengths[pool] - 1):
        heap.free[pool, at] = heap.free[pool, at + 1]
    heap.lengths[pool] -= 1


@_compiled
def _put_in(heap: Heap, block: int) -> None:
    pool = heap.pool[block]
    heap.state[block] = FREE
    place = _place(heap, pool, heap.size[block], heap.address[block])
    for at in range(heap.lengths[pool], place, -1):
        heap.free[pool, at] = heap.free[pool, at - 1]
    heap.free[pool, place] = block
    heap.lengths[pool] += 1


@_compiled
def _new_block(heap: Heap, address: int, size: int, pool: int) -> int:
    heap.books[SPARES] -= 1
    block = heap.spare[heap.books[SPARES]]
    heap.address[block], heap.size[block], heap.pool[block] = address, size, pool
    heap.before[block], heap.after[block] = NONE, NONE
    return int(block)


@_compiled
def _no_block(heap: Heap, block: int) -> None:
    heap.spare[heap.books[SPARES]] = block
    heap.books[SPARES] += 1


@_compiled
def _absorb(heap: Heap, block: int, other: int) -> None:
    """A free neighbour becomes part of the block."""
    pool = heap.pool[other]
    _take_out(heap, pool, _place(heap, pool, heap.size[other], heap.address[other]))
    if other == heap.before[block]:
        heap.address[block], heap.before[block] = heap.address[other], heap.before[other]
        if heap.before[block] != NONE:
            heap.after[heap.before[block]] = block
    else:
        heap.after[block] = heap.after[other]
        if heap.after[block] != NONE:
            heap.before[heap.after[block]] = block
    heap.size[block] += heap.size[other]
    _no_block(heap, other)


@_compiled
def _to_the_cache(heap: Heap, block: int) -> None:
    if heap.before[block] != NONE and heap.state[heap.before[block]] == FREE:
        _absorb(heap, block, heap.before[block])
    if heap.after[block] != NONE and heap.state[heap.after[block]] == FREE:
        _absorb(heap, block, heap.after[block])
    _put_in(heap, block)


@_compiled
def _empty_cache(heap: Heap, several_streams: bool) -> None:
    """Every unused segment goes back to the driver, when all streams have passed."""
    for number in range(len(heap.holder) if several_streams else 0):
        _come_back(heap, number)
    for pool in range(len(heap.lengths)):
        kept = 0
        for place in range(heap.lengths[pool]):
            block = heap.free[pool, place]
            if heap.before[block] == NONE and heap.after[block] == NONE:
                heap.books[RESERVED] -= heap.size[block]
                _no_block(heap, block)
            else:
                heap.free[pool, kept] = block
                kept += 1
        heap.lengths[pool] = kept


@_compiled
def _come_back(heap: Heap, number: int) -> None:
    """Another stream has passed."""
    if heap.waiting[number]:
        heap.waiting[number] = 0
        _to_the_cache(heap, heap.holder[number])


@_compiled
def _segment(size: int) -> int:
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < EXACT_FROM:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


@_compiled
def _fresh(heap: Heap, pool: int, size: int, several_streams: bool) -> int:
    """A block of a new segment, with the cache given back for it where it must be; -1 where there is no room even then."""
    segment, room = _segment(size), heap.books[ROOM]
    if room != NONE and heap.books[RESERVED] + segment > room:
        _empty_cache(heap, several_streams)
        heap.books[RETRIES] += 1
        if heap.books[RESERVED] + segment > room:
            heap.books[ASKED] = size
            return NONE
    heap.books[RESERVED] += segment
    block = _new_block(heap, heap.books[ADDRESS], segment, pool)
    heap.books[ADDRESS] += segment
    return block


@_compiled
def _malloc(heap: Heap, number: int, request: int, stream: int, several_streams: bool) -> bool:
    """Whether there was room."""
    if heap.books[SPARES] < 2:
        heap.books[SPARES] = NONE
        return False
    size = -(-request // MIN_BLOCK) * MIN_BLOCK
    small = size <= SMALL_REQUEST
    pool = 2 * stream + (1 if small else 0)
    place = _place(heap, pool, size, NONE)
    if place < heap.lengths[pool]:
        block = heap.free[pool, place]
        _take_out(heap, pool, place)
    else:
        block = _fresh(heap, pool, size, several_streams)
        if block == NONE:
            return False
    remainder = heap.size[block] - size
    if (small and remainder >= MIN_BLOCK) or (not small and remainder > LEAST_LARGE_REMAINDER):
        rest = _new_block(heap, heap.address[block] + size, remainder, pool)
        heap.before[rest], heap.after[rest] = block, heap.after[block]
        if heap.after[block] != NONE:
            heap.before[heap.after[block]] = rest
        heap.after[block], heap.size[block] = rest, size
        _put_in(heap, rest)
    heap.state[block] = IN_USE
    heap.holder[number] = block
    heap.books[REQUESTED] += request
    heap.books[ALLOCATED] += heap.size[block]
    return True


@_compiled
def _free(heap: Heap, number: int, request: int, waits: bool) -> None:
    block = heap.holder[number]
    if block == NONE:
        return
    heap.books[REQUESTED] -= request
    heap.books[ALLOCATED] -= heap.size[block]
    if waits:
        heap.waiting[number] = 1
    else:
        _to_the_cache(heap, block)


@_compiled
def _note(peaks: Integers, row: int, books: Integers, event: int) -> None:
    if books[ALLOCATED] > peaks[row, 1]:
        peaks[row, 1], peaks[row, 3] = books[ALLOCATED], event
    peaks[row, 0] = max(peaks[row, 0], books[REQUESTED])
    peaks[row, 2] = max(peaks[row, 2], books[RESERVED])


@_compiled
def _heap(requests: Integers, streams: Integers, most: int, room: int) -> Heap:
    count = len(requests)
    pools = 2 * (1 + (streams.max() if count else 0))
    books = np.zeros(8, np.int64)
    books[SPARES], books[ROOM] = most, room
    return Heap(
        np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64),
        np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros((pools, most), np.int64), np.zeros(pools, np.int64),
        np.arange(most), np.full(count, NONE), np.zeros(count, np.int64), books,
    )  # fmt: skip


@_compiled
def _due(waits: Integers) -> tuple[Integers, Integers]:
    """For each allocation the first of those that come back before it, and for each of those the next. What waits for one
    beyond the last is never back."""
    due, following = np.full(len(waits), NONE), np.full(len(waits), NONE)
    for number in range(len(waits) - 1, -1, -1):
        if NONE != waits[number] < len(waits):
            following[number] = due[waits[number]]
            due[waits[number]] = number
    return due, following


@_compiled
def _walk(
    events: Integers,
    starts: Integers,
    belongs: Integers,
    emptied: Integers,
    looked: int,
    streams: Integers,
    waits: Integers,
    requests: Integers,
    rows: int,
    most: int,
    room: int,
) -> tuple[Integers, Integers, Integers, bool]:
    heap, (due, following) = _heap(requests, streams, most, room), _due(waits)
    peaks, seen = np.zeros((rows + 1, 4), np.int64), np.zeros(rows + 1, np.int64)
    peaks[:, 3] = NONE
    several = bool(waits.max() >= 0) if len(waits) else False
    for stretch in range(len(starts)):
        start = starts[stretch]
        if stretch < len(belongs) and emptied[stretch]:
            _empty_cache(heap, several)
        if stretch == looked:
            seen[rows] = 1
            _note(peaks, rows, heap.books, start - 1)
        if stretch == len(belongs):
            break
        row = belongs[stretch]
        seen[row] = 1
        _note(peaks, row, heap.books, start - 1)
        for at in range(start, starts[stretch + 1]):
            number = abs(events[at]) - 1
            if events[at] < 0:
                _free(heap, number, requests[number], waits[number] != NONE)
                continue
            back = due[number] if several else NONE
            while back != NONE:
                _come_back(heap, back)
                back = following[back]
            if requests[number] and not _malloc(heap, number, requests[number], streams[number], several):
                return peaks, seen, heap.books, False
            _note(peaks, row, heap.books, at)
    return peaks, seen, heap.books, True

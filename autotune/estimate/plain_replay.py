"""Replay of a step on a single stream, with torch's default settings, in plain Python.

The rules are those of `allocator`, as one loop over lists instead of objects and calls, which take
a third of its time. Steps with several streams, and other settings, are replayed there.

    block     index into the lists `size_of`, `address_of`, `before`, `after` and `is_free`
    pool      free blocks of one kind as (size, address, block), in this order: those of requests
              up to 1 MiB, or the larger ones
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from autotune.estimate.allocator import (
    ADDRESS_SPACE_BYTES,
    LEAST_LARGE_REMAINDER,
    MIN_BLOCK,
    SMALL_REQUEST,
    OutOfMemory,
    segment_bytes,
)
from autotune.estimate.replay_arrays import (
    NONE,
    PEAK_COLUMNS,
    EventArrays,
    Integers,
    ReplayPeaks,
)

FreeBlocks: TypeAlias = list[tuple[int, int, int]]

ROUNDED_DOWN = -MIN_BLOCK  # as a mask
ENDLESS = 1 << 62


def is_plain(arrays: EventArrays) -> bool:
    """Return True if one stream makes all allocations, and no other one reads them."""
    return not arrays.streams.any() and bool((arrays.waits == NONE).all())


def replay_events(
    arrays: EventArrays,
    sizes: Integers,
    rows: int,
    capacity_bytes: int | None,
) -> ReplayPeaks:
    """Replay the events with these sizes; return the peaks of every row."""
    # 1. The events and the empty memory.
    events = arrays.events.tolist()
    starts = arrays.starts.tolist()
    emptied = arrays.emptied.tolist()
    requests = sizes.tolist()
    capacity = ENDLESS if capacity_bytes is None else capacity_bytes
    size_of: list[int] = []
    address_of: list[int] = []
    before: list[int] = []
    after: list[int] = []
    is_free: list[bool] = []
    small: FreeBlocks = []
    large: FreeBlocks = []
    pool_of: list[FreeBlocks] = []
    block_of = [NONE] * len(requests)
    lowest_address = ADDRESS_SPACE_BYTES
    requested = allocated = reserved = retries = 0
    peaks = [[0] * (PEAK_COLUMNS - 1) + [NONE] for _ in range(rows + 1)]
    reached = np.zeros(rows + 1, dtype=np.int64)
    failure: OutOfMemory | None = None

    for stretch, row in enumerate([*arrays.rows.tolist(), rows]):
        # 2. The beginning of a stretch, or the end.
        is_end = row == rows
        begin = starts[stretch]
        if not is_end and emptied[stretch]:
            reserved -= _released_bytes((small, large), before, after)
        if stretch == arrays.snapshot:
            peaks[rows] = _raised(peaks[rows], requested, allocated, reserved, begin - 1)
        if is_end:
            break
        reached[row] = 1
        peak = _raised(peaks[row], requested, allocated, reserved, begin - 1)
        top_requested, top_allocated, top_reserved, top_event = peak

        for at in range(begin, starts[stretch + 1]):
            entry = events[at]
            # 3. A free: the block returns to its pool, merged with free neighbours.
            if entry < 0:
                number = -entry - 1
                block = block_of[number]
                if block == NONE:
                    continue  # of an empty tensor
                size = size_of[block]
                requested -= requests[number]
                allocated -= size
                pool = pool_of[block]
                neighbour = before[block]
                if neighbour != NONE and is_free[neighbour]:
                    address = address_of[neighbour]
                    del pool[bisect_left(pool, (size_of[neighbour], address))]
                    size += size_of[neighbour]
                    address_of[block] = address
                    before[block] = outer = before[neighbour]
                    if outer != NONE:
                        after[outer] = block
                neighbour = after[block]
                if neighbour != NONE and is_free[neighbour]:
                    del pool[bisect_left(pool, (size_of[neighbour], address_of[neighbour]))]
                    size += size_of[neighbour]
                    after[block] = outer = after[neighbour]
                    if outer != NONE:
                        before[outer] = block
                size_of[block] = size
                is_free[block] = True
                insort(pool, (size, address_of[block], block))
                continue

            # 4. A request: the smallest free block that is large enough, or a new segment.
            number = entry - 1
            request = requests[number]
            if request == 0:
                continue
            rounded = (request + MIN_BLOCK - 1) & ROUNDED_DOWN
            pool = small if rounded <= SMALL_REQUEST else large
            place = bisect_left(pool, (rounded,))
            if place < len(pool):
                size, _, block = pool.pop(place)
            else:
                size = segment_bytes(rounded)
                if reserved + size > capacity:
                    reserved -= _released_bytes((small, large), before, after)
                    retries += 1
                if reserved + size > capacity:
                    failure = OutOfMemory(
                        request_bytes=rounded,
                        reserved_bytes=reserved,
                        allocated_bytes=allocated,
                    )
                    break
                reserved += size
                lowest_address -= size
                block = len(size_of)
                size_of.append(size)
                address_of.append(lowest_address)
                before.append(NONE)
                after.append(NONE)
                is_free.append(False)
                pool_of.append(pool)

            # 5. What the block has beyond it is split off, if that is large enough.
            surplus = size - rounded
            if surplus > LEAST_LARGE_REMAINDER or (surplus and pool is small):
                remainder = len(size_of)
                address = address_of[block] + rounded
                outer = after[block]
                size_of.append(surplus)
                address_of.append(address)
                before.append(block)
                after.append(outer)
                is_free.append(True)
                pool_of.append(pool)
                if outer != NONE:
                    before[outer] = remainder
                after[block] = remainder
                insort(pool, (surplus, address, remainder))
                size_of[block] = size = rounded
            is_free[block] = False
            block_of[number] = block
            requested += request
            allocated += size

            # 6. What is held now.
            if allocated > top_allocated:
                top_allocated = allocated
                top_event = at
            if requested > top_requested:
                top_requested = requested
            if reserved > top_reserved:
                top_reserved = reserved
        peaks[row] = [top_requested, top_allocated, top_reserved, top_event]
        if failure is not None:
            break
    return ReplayPeaks(np.array(peaks, dtype=np.int64), reached, retries, failure)


def _released_bytes(
    pools: tuple[FreeBlocks, FreeBlocks],
    before: Sequence[int],
    after: Sequence[int],
) -> int:
    """Return the free blocks that are whole segments to the driver; return their size."""
    released = 0
    for pool in pools:
        remaining = []
        for size, address, block in pool:
            if before[block] == NONE and after[block] == NONE:
                released += size
            else:
                remaining.append((size, address, block))
        pool[:] = remaining
    return released


def _raised(
    peak: Sequence[int],
    requested: int,
    allocated: int,
    reserved: int,
    event: int,
) -> list[int]:
    """Return the peak, raised to what is held after an event."""
    top_requested, top_allocated, top_reserved, top_event = peak
    if allocated > top_allocated:
        top_event = event
    return [
        max(top_requested, requested),
        max(top_allocated, allocated),
        max(top_reserved, reserved),
        top_event,
    ]

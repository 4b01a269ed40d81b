"""The allocator against torch's rules: sequences computed by hand, and properties of all
sequences.
"""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.units import GIB, KIB, MIB
from autotune.estimate.allocator import AllocatorSettings, CachingAllocator, OutOfMemory

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def test_a_byte_is_512_allocated_and_a_small_segment_reserved() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 1)
    assert (allocator.requested, allocator.allocated, allocator.reserved) == (1, 512, 2 * MIB)


def test_small_requests_share_a_segment_until_it_is_full() -> None:
    allocator = CachingAllocator()
    for number in range(2):
        allocator.malloc(number, MIB)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(2, 512)
    assert allocator.reserved == 4 * MIB


def test_requests_of_one_to_ten_mebibytes_share_segments_of_twenty() -> None:
    allocator = CachingAllocator()
    for number in range(2):
        allocator.malloc(number, 9 * MIB)
    assert (allocator.allocated, allocator.reserved) == (18 * MIB, 20 * MIB)
    allocator.malloc(2, 3 * MIB)  # two are left: three do not fit
    assert allocator.reserved == 40 * MIB


def test_a_large_request_gets_a_segment_of_its_own_rounded_to_two_mebibytes() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 11 * MIB)
    assert (allocator.allocated, allocator.reserved) == (
        12 * MIB,
        12 * MIB,
    )  # one MiB is too small to split off


def test_a_remainder_above_one_mebibyte_is_split_off_and_used() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 100 * MIB)
    allocator.free(0)
    allocator.malloc(1, 60 * MIB)
    assert (allocator.allocated, allocator.reserved) == (60 * MIB, 100 * MIB)
    allocator.malloc(2, 40 * MIB)
    assert (allocator.allocated, allocator.reserved) == (100 * MIB, 100 * MIB)


def test_the_smallest_sufficient_block_is_taken() -> None:
    allocator = CachingAllocator()
    for number, size in enumerate((300, 100, 200)):
        allocator.malloc(number, size * MIB)
    for number in range(3):
        allocator.free(number)
    allocator.malloc(3, 90 * MIB)  # out of the 100
    allocator.malloc(4, 200 * MIB)
    allocator.malloc(5, 300 * MIB)
    assert allocator.reserved == 600 * MIB


def test_of_free_blocks_of_one_size_the_newest_segments_is_taken() -> None:
    allocator = CachingAllocator()
    for number in range(2):
        allocator.malloc(number, 12 * MIB)
    newest = allocator._in_use[1][0]
    for number in range(2):
        allocator.free(number)
    allocator.malloc(2, 12 * MIB)
    assert allocator._in_use[2][0] is newest


def test_free_neighbours_merge() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 90 * MIB)
    allocator.free(0)
    for number in (1, 2, 3):
        allocator.malloc(number, 30 * MIB)
    for number in (1, 3, 2):  # the middle one last: it joins both sides
        allocator.free(number)
    allocator.malloc(4, 90 * MIB)
    assert allocator.reserved == 90 * MIB


def test_blocks_of_different_segments_never_merge() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 30 * MIB)
    allocator.malloc(1, 30 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.malloc(2, 60 * MIB)
    assert allocator.reserved == 120 * MIB


def test_small_and_large_requests_do_not_use_each_others_memory() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 40 * MIB)
    allocator.free(0)
    allocator.malloc(1, MIB)
    assert allocator.reserved == 42 * MIB


def test_without_room_the_cache_is_emptied_and_the_request_retried() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.malloc(0, 60 * MIB)
    allocator.free(0)
    allocator.malloc(1, 80 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 80 * MIB)


def test_a_partly_used_segment_cannot_be_released() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.malloc(0, 60 * MIB)
    allocator.free(0)
    allocator.malloc(1, 20 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(2, 70 * MIB)
    assert (
        caught.value.request_bytes,
        caught.value.reserved_bytes,
        caught.value.allocated_bytes,
    ) == (
        70 * MIB,
        60 * MIB,
        20 * MIB,
    )


def test_emptying_the_cache_keeps_used_blocks() -> None:
    allocator = CachingAllocator()
    for number in range(3):
        allocator.malloc(number, 30 * MIB)
    allocator.free(1)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (60 * MIB, 60 * MIB)


def test_an_empty_request_allocates_nothing() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 0)
    allocator.free(0)
    assert allocator.reserved == allocator.allocated == 0


def test_blocks_above_the_largest_split_size_stay_whole() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_bytes=50 * MIB))
    allocator.malloc(0, 100 * MIB)
    allocator.free(0)
    allocator.malloc(1, 30 * MIB)  # cannot use the large one
    assert allocator.reserved == 130 * MIB
    allocator.malloc(2, 90 * MIB)  # can, whole: less than 20 MiB smaller
    assert (allocator.allocated, allocator.reserved) == (130 * MIB, 130 * MIB)


def test_unsplittable_blocks_are_released_first_without_a_retry() -> None:
    allocator = CachingAllocator(
        AllocatorSettings(max_split_bytes=50 * MIB), capacity_bytes=200 * MIB
    )
    allocator.malloc(0, 120 * MIB)
    allocator.malloc(1, 20 * MIB)
    allocator.free(0)
    allocator.malloc(2, 80 * MIB)  # 120 is too large for it, and is released
    assert (allocator.retries, allocator.reserved) == (0, 100 * MIB)


def test_an_expandable_segment_grows_by_pages_behind_free_memory() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(0, 30 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.malloc(1, 30 * MIB)  # ten are free: twenty more are mapped
    assert (allocator.allocated, allocator.reserved) == (60 * MIB, 60 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.malloc(2, 60 * MIB)  # one address range
    assert allocator.reserved == 60 * MIB


def test_an_expandable_segment_releases_whole_pages_from_the_middle() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    for number, size in enumerate((10, 60, 10)):
        allocator.malloc(number, size * MIB)
    assert allocator.reserved == 80 * MIB
    allocator.free(1)  # from 10 to 70: the pages from 20 to 60 are whole
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (20 * MIB, 40 * MIB)
    allocator.malloc(3, 40 * MIB)  # the first hole: ten bytes free before it, and ten behind
    assert allocator.reserved == 80 * MIB


def test_a_block_that_can_grow_is_used_last() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    for number, size in enumerate((20, 10, 4)):
        allocator.malloc(number, size * MIB)  # 34 of 40 are used, 6 at the end can grow
    allocator.free(0)  # 20 in the middle cannot
    allocator.malloc(3, 5 * MIB)
    allocator.malloc(4, 15 * MIB)  # fits behind the five only if those came from the closed block
    assert allocator.reserved == 40 * MIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", EXPANDABLE),
        (
            "max_split_size_mb:128, garbage_collection_threshold:0.8",
            AllocatorSettings(max_split_bytes=128 * MIB),
        ),
        (
            "expandable_segments:False,max_split_size_mb:64",
            AllocatorSettings(max_split_bytes=64 * MIB),
        ),
    ],
)
def test_settings_are_parsed_from_the_environment_variable(
    text: str, expected: AllocatorSettings
) -> None:
    assert AllocatorSettings.of(text) == expected


sequences = st.lists(
    st.one_of(
        st.integers(1, 3 * KIB),
        st.integers(MIB - 600, MIB + 600),
        st.integers(MIB, 12 * MIB),
        st.integers(9 * MIB, 90 * MIB),
        st.just(-1),
        st.integers(-40, -2),
    ),
    max_size=120,
)
"""Sizes to request; below -1 frees the request of that place, -1 empties the cache."""


def run(sequence: list[int], allocator: CachingAllocator) -> dict[int, int]:
    """Held requests by number."""
    live: dict[int, int] = {}
    for number, entry in enumerate(sequence):
        if entry > 0:
            try:
                allocator.malloc(number, entry)
            except OutOfMemory:
                continue
            live[number] = entry
        elif entry == -1:
            allocator.empty_cache()
        elif live:
            gone = sorted(live)[entry % len(live)]
            allocator.free(gone)
            del live[gone]
    return live


configurations = st.sampled_from(
    [AllocatorSettings(), EXPANDABLE, AllocatorSettings(max_split_bytes=20 * MIB)]
)


@settings(max_examples=150, deadline=None)
@given(sequences, configurations)
def test_counters_match_the_blocks_after_any_sequence(
    sequence: list[int], configuration: AllocatorSettings
) -> None:
    allocator = CachingAllocator(configuration)
    live = run(sequence, allocator)
    assert allocator.requested == sum(live.values())
    assert allocator.requested <= allocator.allocated <= allocator.reserved
    assert allocator.reserved % (2 * MIB) == 0
    free = sum(
        size for pools in allocator._pools.values() for pool in pools for size, _, _ in pool.free
    )
    assert free == allocator.reserved - allocator.allocated


@settings(max_examples=100, deadline=None)
@given(sequences, configurations)
def test_nothing_stays_reserved_after_everything_is_freed(
    sequence: list[int], configuration: AllocatorSettings
) -> None:
    allocator = CachingAllocator(configuration)
    for number in run(sequence, allocator):
        allocator.free(number)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


@settings(max_examples=100, deadline=None)
@given(sequences, configurations, st.integers(4, 300))
def test_no_more_than_the_capacity_is_ever_reserved(
    sequence: list[int],
    configuration: AllocatorSettings,
    capacity: int,
) -> None:
    allocator = CachingAllocator(configuration, capacity_bytes=capacity * MIB)
    run(sequence, allocator)
    assert allocator.allocated <= allocator.reserved <= capacity * MIB


@settings(max_examples=100, deadline=None)
@given(sequences, configurations)
def test_blocks_of_a_segment_neither_overlap_nor_leave_gaps(
    sequence: list[int], configuration: AllocatorSettings
) -> None:
    allocator = CachingAllocator(configuration)
    run(sequence, allocator)
    for block, size in allocator._in_use.values():
        assert block.size >= size
        for neighbour in (block.before, block.after):
            if neighbour is not None:
                first, second = sorted((block, neighbour), key=lambda entry: entry.address)
                assert first.address + first.size == second.address


@settings(max_examples=60, deadline=None)
@given(sequences)
def test_more_memory_never_fails_where_less_sufficed(sequence: list[int]) -> None:
    """The cache only helps: the same requests never need more than an unlimited device reserved."""
    endless = CachingAllocator()
    peak = 0
    for number, entry in enumerate(sequence):
        if entry > 0:
            endless.malloc(number, entry)
            peak = max(peak, endless.reserved)
    bounded = CachingAllocator(capacity_bytes=peak)
    for number, entry in enumerate(sequence):
        if entry > 0:
            bounded.malloc(number, entry)
    assert (bounded.reserved, bounded.retries) == (endless.reserved, 0)


@pytest.mark.parametrize("configuration", [AllocatorSettings(), EXPANDABLE])
def test_twenty_thousand_events_take_a_fraction_of_a_second(
    configuration: AllocatorSettings,
) -> None:
    allocator = CachingAllocator(configuration)
    began = time.process_time()
    for number in range(10_000):
        allocator.malloc(number, (number * 7_919_317) % (64 * MIB) + 1)
        if number >= 300:
            allocator.free(number - 300)
    assert time.process_time() - began < 1.0  # a fifth of it on an idle machine
    assert 8 * GIB < allocator.allocated <= allocator.reserved < 20 * GIB

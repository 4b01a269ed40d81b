"""Blocks of one stream are not another's, and what another stream still reads comes back later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autotune.predict.allocator import CachingAllocator
from autotune.predict.replay import replay
from autotune.predict.streams import OnStreams
from autotune.trace import Inventory, Mark, Trace
from autotune.units import MIB


def trace(*events: int, streams: Mapping[int, int] | None = None, returns: Mapping[int, int] | None = None) -> Trace:
    """n+1 makes allocation n of 20 MiB, -(n+1) gives it back."""
    count = max(abs(event) for event in events)
    return Trace(
        basis="traced",
        versions={},
        device="cuda",
        layers=1,
        sizes=(20 * MIB,) * count,
        parts=(0,) * count,
        part_names=("activations",),
        events=events,
        marks=(Mark(event=0, phase="forward", step=0),),
        work=(),
        inventory=Inventory(
            parameters=0, trainable_parameters=0, weight_bytes=0, trainable_bytes=0, layer_bytes=(), layer_trainable=(),
            largest_parameter=0,
        ),
        streams=streams or {},
        returns=returns or {},
    )  # fmt: skip


def test_a_block_given_back_on_one_stream_serves_only_that_stream() -> None:
    events = (1, -1, 2)
    assert replay(trace(*events)).reserved_bytes == 20 * MIB
    assert replay(trace(*events, streams={0: 1, 1: 1})).reserved_bytes == 20 * MIB
    assert replay(trace(*events, streams={1: 1})).reserved_bytes == 40 * MIB


@pytest.mark.parametrize(("before", "reserved"), [(1, 20 * MIB), (2, 40 * MIB), (99, 60 * MIB)])
def test_what_another_stream_reads_serves_from_when_that_has_passed(before: int, reserved: int) -> None:
    """Three after each other; the first comes back before the second, the third, or never. The second always waits."""
    found = replay(trace(1, -1, 2, -2, 3, returns={0: before, 1: 99}))
    assert found.reserved_bytes == (reserved if before == 2 else max(reserved, 40 * MIB))
    assert found.allocated_bytes == found.requested_bytes == 20 * MIB, "what waits is not allocated"


def test_emptying_the_cache_waits_for_every_stream() -> None:
    both = OnStreams(trace(1, -1, 2, -2, streams={1: 1}, returns={0: 99, 1: 99}))
    for number in (0, 1):
        both.malloc(number, 20 * MIB)
        both.free(number)
    assert both.reserved == 40 * MIB and both.allocated == both.requested == 0
    both.empty_cache()
    assert both.reserved == 0


def test_the_device_is_shared_and_its_cache_is_given_back_on_all_streams() -> None:
    held = trace(1, 2, streams={1: 1})
    assert replay(held, capacity_bytes=30 * MIB).out_of_memory is not None
    assert replay(held, capacity_bytes=40 * MIB).out_of_memory is None
    cached = replay(trace(1, -1, 2, streams={1: 1}), capacity_bytes=30 * MIB)
    assert cached.out_of_memory is None and cached.retries == 1


def test_on_one_stream_nothing_differs() -> None:
    one = trace(1, 2, -2, 3)
    apart, plain = OnStreams(one), CachingAllocator()
    for event in one.events:
        for allocator in (apart, plain):
            allocator.malloc(event - 1, 20 * MIB) if event > 0 else allocator.free(-event - 1)
    assert (apart.reserved, apart.allocated, apart.requested) == (plain.reserved, plain.allocated, plain.requested)
    assert replay(replace(one, returns={1: 2})).reserved_bytes == replay(one).reserved_bytes

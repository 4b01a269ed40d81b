"""Streams: separate blocks, and deferred returns of blocks that another stream reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autotune.core.trace import Inventory, Mark, Trace
from autotune.core.units import MIB
from autotune.estimate.allocator import CachingAllocator
from tests.estimate.synthetic import replay


def trace(*events: int, streams: Mapping[int, int] | None = None, returns: Mapping[int, int] | None = None) -> Trace:
    """Trace in which n+1 makes allocation n of 20 MiB and -(n+1) frees it."""
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


def test_a_freed_block_serves_its_own_stream_alone() -> None:
    events = (1, -1, 2)
    assert replay(trace(*events)).reserved_bytes == 20 * MIB
    assert replay(trace(*events, streams={0: 1, 1: 1})).reserved_bytes == 20 * MIB
    assert replay(trace(*events, streams={1: 1})).reserved_bytes == 40 * MIB


@pytest.mark.parametrize(("before", "reserved"), [(1, 20 * MIB), (2, 40 * MIB), (99, 60 * MIB)])
def test_a_deferred_block_is_reused_after_the_other_stream_passed(before: int, reserved: int) -> None:
    """Three in a row; the first returns before the second, the third, or never. The second always waits."""
    found = replay(trace(1, -1, 2, -2, 3, returns={0: before, 1: 99}))
    assert found.reserved_bytes == (reserved if before == 2 else max(reserved, 40 * MIB))
    (held,) = found.phases
    assert held.allocated_bytes == held.requested_bytes == 20 * MIB, "a deferred block is not allocated"


def test_emptying_the_cache_waits_for_every_stream() -> None:
    both = CachingAllocator(streams={1: 1}, returns={0: 99, 1: 99})
    for number in (0, 1):
        both.malloc(number, 20 * MIB)
        both.free(number)
    assert both.reserved == 40 * MIB and both.allocated == both.requested == 0
    both.empty_cache()
    assert both.reserved == 0


def test_streams_share_the_device_and_empty_the_cache_together() -> None:
    held = trace(1, 2, streams={1: 1})
    assert replay(held, capacity_bytes=30 * MIB).out_of_memory is not None
    assert replay(held, capacity_bytes=40 * MIB).out_of_memory is None
    cached = replay(trace(1, -1, 2, streams={1: 1}), capacity_bytes=30 * MIB)
    assert cached.out_of_memory is None and cached.retries == 1


def test_a_block_that_returns_before_the_next_request_changes_nothing() -> None:
    one = trace(1, 2, -2, 3)
    assert replay(replace(one, returns={1: 2})).reserved_bytes == replay(one).reserved_bytes

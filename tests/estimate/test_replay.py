"""Replay of traces: peaks of every phase, and streams with blocks that return later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autotune.core.trace import Inventory, Mark, Trace
from autotune.core.units import MIB
from autotune.estimate.allocator import AllocatorSettings, CachingAllocator
from autotune.estimate.phase_use import PhaseUse, Replay
from autotune.estimate.track import Track
from tests.estimate.synthetic import Book, replay, training


def phases_of(trace: Trace) -> dict[tuple[str, int], PhaseUse]:
    return {(use.phase, use.step): use for use in replay(trace).phases}


def requested_peak(replayed: Replay) -> int:
    return max(use.requested_bytes for use in replayed.phases)


def test_phases_by_hand() -> None:
    """Weights 100; activations 4 x 30 and logits 50; in the backward pass one gradient per freed
    activation.
    """
    phases = phases_of(training(steps=2))
    assert phases["load", 0].requested_bytes == 100 * MIB
    assert phases["forward", 0].requested_bytes == 270 * MIB
    assert phases["backward", 0].requested_bytes == 270 * MIB
    assert phases["optimizer", 0].requested_bytes == (100 + 100 + 200) * MIB
    assert phases["forward", 1].requested_bytes == (100 + 200 + 170) * MIB
    assert phases["forward", 1].parts == {
        "weights": 100 * MIB,
        "optimizer": 200 * MIB,
        "activations": 120 * MIB,
        "logits": 50 * MIB,
    }


def test_segments_by_hand() -> None:
    """25 MiB in segments of 26, the rest too small to split off; 30 and 50 in segments of their
    own size.
    """
    phases = phases_of(training(steps=1))
    assert phases["load", 0].reserved_bytes == 4 * 26 * MIB
    assert phases["load", 0].allocated_bytes == 4 * 26 * MIB
    assert phases["forward", 0].reserved_bytes == (4 * 26 + 4 * 30 + 50) * MIB


def test_later_phases_include_the_cache_of_earlier_ones() -> None:
    phases = replay(training(steps=2)).phases
    reserved = [use.reserved_bytes for use in phases]
    assert reserved == sorted(reserved)


def test_the_requested_peak_equals_the_traces() -> None:
    trace = training(micro_batch=3)
    assert requested_peak(replay(trace)) == trace.peak_bytes


@pytest.mark.parametrize("steps", [1, 2])
def test_requests_alone_have_the_replays_requested_peaks(steps: int) -> None:
    """Without a replay, for each phase of each step, parts included: blocks are the requests."""
    track = Track(training(steps=steps), resting_before=None)
    replayed = track.replay().phases
    requests = track.requests(track.sizes)
    assert requests.reached.sum() == len(replayed)
    for row, use in enumerate(replayed):
        peaks = requests.peaks[row].tolist()
        assert peaks[:3] == [use.requested_bytes] * 3
    usage = {use.phase: use for use in track.usage(requests, track.sizes).phases}
    assert (
        usage["backward"].requested_bytes
        == usage["backward"].reserved_bytes
        == 270 * MIB + (200 * MIB * (steps - 1))
    )


def test_expandable_segments_reserve_what_is_allocated_up_to_a_page() -> None:
    replayed = replay(training(), settings=AllocatorSettings(expandable_segments=True))
    assert max(use.allocated_bytes for use in replayed.phases) == 470 * MIB
    assert requested_peak(replayed) == 470 * MIB
    assert replayed.reserved_bytes == 480 * MIB


def test_out_of_memory_reports_the_phase_and_stops() -> None:
    replayed = replay(training(), capacity_bytes=200 * MIB)
    assert replayed.out_of_memory is not None
    assert [use.phase for use in replayed.phases] == ["load", "forward"]


def test_just_enough_room_is_enough() -> None:
    loose = replay(training())
    assert replay(training(), capacity_bytes=loose.reserved_bytes).out_of_memory is None


def test_less_suffices_with_the_cache_emptied() -> None:
    book = Book()
    book.enter("load")
    first = book.make(60 * MIB, "weights")
    book.drop(first)
    book.make(80 * MIB, "weights")
    replayed = replay(book.trace(), capacity_bytes=100 * MIB)
    assert (replayed.retries, replayed.reserved_bytes, replayed.out_of_memory) == (
        1,
        80 * MIB,
        None,
    )


def test_the_resting_state_has_an_emptied_cache() -> None:
    trace = training(steps=2)
    second = next(mark.event for mark in trace.marks if mark.step == 1)
    cached = replay(trace, resting_before=second).resting
    emptied = replay(trace, resting_before=second, empty_cache_before=[second]).resting
    assert cached is not None and emptied is not None
    assert cached.parts == emptied.parts == {"weights": 100 * MIB, "optimizer": 200 * MIB}
    assert emptied.reserved_bytes < cached.reserved_bytes
    assert emptied.reserved_bytes >= emptied.allocated_bytes


@pytest.mark.parametrize("steps", [1, 2])
def test_a_resting_state_after_the_last_event(steps: int) -> None:
    trace = training(steps=steps)
    resting = replay(trace, resting_before=len(trace.events)).resting
    assert resting is not None
    assert resting.parts == {"weights": 100 * MIB, "optimizer": 200 * MIB}


def trace(
    *events: int, streams: Mapping[int, int] | None = None, returns: Mapping[int, int] | None = None
) -> Trace:
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
        marks=(
            Mark(
                event=0,
                phase="forward",
                step=0,
            ),
        ),
        work=(),
        inventory=Inventory(
            parameters=0,
            trainable_parameters=0,
            weight_bytes=0,
            trainable_bytes=0,
            layer_bytes=(),
            layer_trainable=(),
            largest_parameter=0,
        ),
        streams=streams or {},
        returns=returns or {},
    )


def test_a_freed_block_serves_its_own_stream_alone() -> None:
    events = (1, -1, 2)
    assert replay(trace(*events)).reserved_bytes == 20 * MIB
    assert replay(trace(*events, streams={0: 1, 1: 1})).reserved_bytes == 20 * MIB
    assert replay(trace(*events, streams={1: 1})).reserved_bytes == 40 * MIB


@pytest.mark.parametrize(("before", "reserved"), [(1, 20 * MIB), (2, 40 * MIB), (99, 60 * MIB)])
def test_a_deferred_block_is_reused_after_the_other_stream_passed(
    before: int, reserved: int
) -> None:
    """Three in a row; the first returns before the second, the third, or never. The second
    always waits.
    """
    replayed = replay(trace(1, -1, 2, -2, 3, returns={0: before, 1: 99}))
    assert replayed.reserved_bytes == (reserved if before == 2 else max(reserved, 40 * MIB))
    (use,) = replayed.phases
    assert use.allocated_bytes == use.requested_bytes == 20 * MIB, (
        "a deferred block is not allocated"
    )


def test_emptying_the_cache_waits_for_every_stream() -> None:
    allocator = CachingAllocator(streams={1: 1}, returns={0: 99, 1: 99})
    for number in (0, 1):
        allocator.malloc(number, 20 * MIB)
        allocator.free(number)
    assert allocator.reserved == 40 * MIB and allocator.allocated == allocator.requested == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_streams_share_the_device_and_empty_the_cache_together() -> None:
    two_streams = trace(1, 2, streams={1: 1})
    assert replay(two_streams, capacity_bytes=30 * MIB).out_of_memory is not None
    assert replay(two_streams, capacity_bytes=40 * MIB).out_of_memory is None
    cached = replay(trace(1, -1, 2, streams={1: 1}), capacity_bytes=30 * MIB)
    assert cached.out_of_memory is None and cached.retries == 1


def test_a_block_that_returns_before_the_next_request_changes_nothing() -> None:
    plain = trace(1, 2, -2, 3)
    assert replay(replace(plain, returns={1: 2})).reserved_bytes == replay(plain).reserved_bytes

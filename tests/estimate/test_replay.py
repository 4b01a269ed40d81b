"""Replays of synthetic traces: the three figures of torch, phase by phase."""

from __future__ import annotations

import pytest

from autotune.core.units import MIB
from autotune.estimate.allocator import AllocatorSettings
from tests.estimate.synthetic import Book, replay, training


def test_phases_by_hand() -> None:
    """Weights 100; activations 4 x 30 and logits 50; in the backward pass one gradient per freed activation."""
    found = {(held.phase, held.step): held for held in replay(training(steps=2)).phases}
    assert found["load", 0].requested_bytes == 100 * MIB
    assert found["forward", 0].requested_bytes == 270 * MIB
    assert found["backward", 0].requested_bytes == 270 * MIB
    assert found["optimizer", 0].requested_bytes == (100 + 100 + 200) * MIB
    assert found["forward", 1].requested_bytes == (100 + 200 + 170) * MIB
    assert found["forward", 1].parts == {
        "weights": 100 * MIB, "optimizer": 200 * MIB, "activations": 120 * MIB, "logits": 50 * MIB,
    }  # fmt: skip


def test_segments_by_hand() -> None:
    """25 MiB in segments of 26, the rest too small to split off; 30 and 50 in segments of their own size."""
    found = {(held.phase, held.step): held for held in replay(training(steps=1)).phases}
    assert found["load", 0].reserved_bytes == 4 * 26 * MIB
    assert found["load", 0].allocated_bytes == 4 * 26 * MIB
    assert found["forward", 0].reserved_bytes == (4 * 26 + 4 * 30 + 50) * MIB


def test_later_phases_include_the_cache_of_earlier_ones() -> None:
    held = replay(training(steps=2)).phases
    reserved = [one.reserved_bytes for one in held]
    assert reserved == sorted(reserved)


def test_the_requested_peak_equals_the_traces() -> None:
    trace = training(micro_batch=3)
    assert max(held.requested_bytes for held in replay(trace).phases) == trace.peak_bytes


def test_expandable_segments_reserve_what_is_allocated_up_to_a_page() -> None:
    found = replay(training(), settings=AllocatorSettings(expandable_segments=True))
    assert max(held.allocated_bytes for held in found.phases) == 470 * MIB
    assert max(held.requested_bytes for held in found.phases) == 470 * MIB
    assert found.reserved_bytes == 480 * MIB


def test_out_of_memory_reports_the_phase_and_stops() -> None:
    found = replay(training(), capacity_bytes=200 * MIB)
    assert found.out_of_memory is not None
    assert [held.phase for held in found.phases] == ["load", "forward"]


def test_just_enough_room_is_enough() -> None:
    loose = replay(training())
    assert replay(training(), capacity_bytes=loose.reserved_bytes).out_of_memory is None


def test_less_suffices_with_the_cache_emptied() -> None:
    book = Book()
    book.enter("load")
    first = book.make(60 * MIB, "weights")
    book.drop(first)
    book.make(80 * MIB, "weights")
    found = replay(book.trace(), capacity_bytes=100 * MIB)
    assert (found.retries, found.reserved_bytes, found.out_of_memory) == (1, 80 * MIB, None)


def test_the_resting_state_has_an_emptied_cache() -> None:
    trace = training(steps=2)
    second = next(mark.event for mark in trace.marks if mark.step == 1)
    kept = replay(trace, resting_before=second).resting
    emptied = replay(trace, resting_before=second, empty_cache_before=[second]).resting
    assert kept is not None and emptied is not None
    assert kept.parts == emptied.parts == {"weights": 100 * MIB, "optimizer": 200 * MIB}
    assert emptied.reserved_bytes < kept.reserved_bytes
    assert emptied.reserved_bytes >= emptied.allocated_bytes


@pytest.mark.parametrize("steps", [1, 2])
def test_a_resting_state_after_the_last_event(steps: int) -> None:
    trace = training(steps=steps)
    resting = replay(trace, resting_before=len(trace.events)).resting
    assert resting is not None
    assert resting.parts == {"weights": 100 * MIB, "optimizer": 200 * MIB}

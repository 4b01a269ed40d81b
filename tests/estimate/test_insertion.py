"""Insertion of allocations and whole phases into a trace."""

from __future__ import annotations

from autotune.core.trace import Trace
from autotune.estimate.insertion import Insertion, inserted
from tests.estimate.synthetic import Book


def small() -> Trace:
    book = Book()
    book.enter("load")
    weights = book.make(100, "weights")
    book.enter("forward")
    kept = book.make(10, "activations")
    other = book.make(20, "activations")
    book.drop(kept)
    book.enter("backward")
    book.drop(other)
    assert weights == 1
    return book.trace()


def phases(trace: Trace) -> list[tuple[str, int, int]]:
    return [(mark.phase, span.start, span.stop) for mark, span in trace.stretches()]


def test_an_inserted_allocation_belongs_to_the_running_phase() -> None:
    trace = inserted(small(), [Insertion(event=2, sizes=(7,), parts=("workspaces",), order=(1,))])
    assert trace.events == (1, 2, 4, 3, -2, -3)
    assert phases(trace) == [("load", 0, 1), ("forward", 1, 5), ("backward", 5, 6)]
    assert trace.live_parts_at(5) == {"weights": 100, "workspaces": 7}


def test_an_inserted_phase_between_two_phases_has_its_own_mark() -> None:
    trace = inserted(small(), [Insertion(event=1, sizes=(7,), parts=("kv_cache",), order=(1, -1), phase="rollout", step=0)])
    assert phases(trace) == [("load", 0, 1), ("rollout", 1, 3), ("forward", 3, 6), ("backward", 6, 7)]


def test_an_inserted_phase_within_a_phase_precedes_its_rest() -> None:
    trace = inserted(small(), [Insertion(event=3, sizes=(7,), parts=("kv_cache",), order=(1, -1), phase="rollout", step=0)])
    assert phases(trace) == [("load", 0, 1), ("forward", 1, 3), ("rollout", 3, 5), ("forward", 5, 6), ("backward", 6, 7)]


def test_an_insertion_after_the_last_event_is_appended() -> None:
    trace = inserted(small(), [Insertion(event=5, sizes=(7,), parts=("kv_cache",), order=(1, -1), phase="rollout", step=1)])
    assert trace.events[-2:] == (4, -4)
    assert ("rollout", 5, 7) in phases(trace)


def test_several_insertions_keep_the_order_and_the_trace() -> None:
    plain = small()
    trace = inserted(
        plain,
        [
            Insertion(event=4, sizes=(5, 6), parts=("workspaces", "workspaces"), order=(1, 2, -1)),
            Insertion(event=0, sizes=(9,), parts=("communication",), order=(1,)),
        ],
    )
    own = [entry for entry in trace.events if abs(entry) <= len(plain.sizes)]
    assert tuple(own) == plain.events
    assert trace.sizes == (100, 10, 20, 9, 5, 6)
    assert trace.live_parts_at(len(trace.events) - 1) == {"weights": 100, "communication": 9, "workspaces": 6}


def test_without_insertions_it_is_the_same() -> None:
    assert inserted(small(), []) == small()

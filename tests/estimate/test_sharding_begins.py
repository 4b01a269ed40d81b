"""Sharding of traces that begin without a load, or whose parameters all stay whole."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.trace import Trace
from autotune.estimate.sharding import Sharding, apply
from tests.estimate.test_sharding import plain, with_adapters


def without_load(trace: Trace) -> Trace:
    """Return the trace as one that begins with the first step's forward pass."""
    marks = tuple(mark for mark in trace.marks if mark.phase != "load")
    return replace(trace, marks=marks)


def test_zero_without_a_load_begins_with_the_first_phase_of_the_trace() -> None:
    """Stage 1 empties the cache when its masters are made: before the first mark there is no
    phase that goes on.
    """
    sharded = apply(without_load(with_adapters()), Sharding(kind="zero1", ranks=4)).trace
    assert (sharded.marks[0].phase, sharded.marks[0].step) == ("forward", 0)
    assert len(sharded.emptied) > 0


def test_fsdp1_without_a_unit_to_shard_has_the_blocks_of_the_plain_trace() -> None:
    """Each parameter trains and is in `ignored_modules`: nothing is gathered."""
    trace = plain()
    sharded = apply(trace, Sharding(kind="fsdp1", ranks=4, ignores_trainable=True)).trace
    gathered = [number for number in sharded.streams if sharded.streams[number]]
    assert not gathered

"""A pool reports how many of the announced traces are done."""

from __future__ import annotations

import pytest

from autotune.core.errors import CannotPredict
from autotune.core.progress import WorkProgress, watched_by
from autotune.prediction.tracer_pool import TracerPool
from tests.prediction.test_tracer_pool import make, spec


def test_every_announced_trace_is_counted_and_a_failed_one_too() -> None:
    received: list[WorkProgress] = []
    tracers = TracerPool(make, most=1)
    with watched_by(received.append):
        tracers.expect([spec(allocations=2), spec(allocations=3), spec(do="untraceable")])
        assert tracers.trace(spec(allocations=3)).peak_bytes == 6
        with pytest.raises(CannotPredict):
            tracers.trace(spec(do="untraceable"))
        tracers.trace(spec(allocations=2))
        tracers.close()
    assert [progress.done for progress in received] == [1, 2, 3]
    assert {progress.expected for progress in received} == {3}
    assert str(received[-1]) == "3 of 3 traces"

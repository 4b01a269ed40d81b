"""Pool of tracing processes: announced traces are computed once, and errors reach the caller that
needs the trace."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import CannotPredict, ProbeError
from autotune.prediction.trace_cache import TraceCache
from autotune.prediction.tracer import Tracer
from autotune.prediction.tracer_pool import OutOfTime, TracerPool
from tests.probe.toys import tree_of

TOY = str(Path(__file__).parent / "toy_trace.py")


def make(versions: Mapping[str, str] | None) -> Tracer:
    return Tracer(
        Path(sys.executable),
        adapter=TOY,
        trace_seconds=20.0,
        versions=versions,
    )


@pytest.fixture(name="tracers")
def two_tracers() -> Iterator[TracerPool]:
    tracers = TracerPool(make, most=2)
    yield tracers
    tracers.close()


def spec(**fields: Any) -> dict[str, Any]:
    return {"model": {"name": "synthetic/model", "folder": None}, **fields}


def test_announced_traces_are_distributed_and_computed_once(tracers: TracerPool) -> None:
    requests = [spec(allocations=count) for count in range(2, 12)]
    tracers.expect([*requests, *requests])
    processes = set()
    for request in requests:
        trace = tracers.trace(request)
        assert trace.peak_bytes == sum(range(1, request["allocations"] + 1))
        processes.add(trace.effective["pid"])
    assert tracers.traced == len(requests)
    assert len(processes) == 2


def test_a_single_request_starts_one_process(tracers: TracerPool) -> None:
    assert (
        tracers.trace(spec()).effective["pid"]
        == tracers.trace(spec(allocations=5)).effective["pid"]
    )


def test_an_error_is_raised_only_by_the_request_that_failed(tracers: TracerPool) -> None:
    tracers.expect([spec(do="untraceable"), spec(do="kill"), spec(), spec(allocations=4)])
    assert tracers.trace(spec(allocations=4)).peak_bytes == 10
    assert tracers.trace(spec()).peak_bytes == 6
    with pytest.raises(CannotPredict, match="custom::op"):
        tracers.trace(spec(do="untraceable"))
    with pytest.raises(ProbeError, match="ended by signal 9"):
        tracers.trace(spec(do="kill"))


@pytest.mark.timeout(60)
def test_a_trace_is_not_waited_for_after_its_time(tracers: TracerPool) -> None:
    with pytest.raises(OutOfTime):
        tracers.trace(spec(do="hang"), until=time.monotonic() + 0.5)
    assert tracers.trace(spec(), until=time.monotonic() + 50).peak_bytes == 6


def test_closing_ends_running_traces_at_once(tracers: TracerPool) -> None:
    tracers.expect([spec(do="hang"), spec(do="hang", allocations=2), spec()])
    deadline = time.monotonic() + 20.0
    while (
        len(tree_of(os.getpid())) < 4 and time.monotonic() < deadline
    ):  # two workers, and the fork of each
        time.sleep(0.02)
    began = time.monotonic()
    tracers.close()
    assert time.monotonic() - began < 10.0, "close waited for a hanging trace"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tracer")]
    assert tracers.trace(spec()).peak_bytes == 6, "a later request starts a new process"


def test_cached_traces_start_no_framework(tmp_path: Path) -> None:
    def cached(versions: Mapping[str, str] | None) -> Tracer:
        return Tracer(
            Path(sys.executable),
            adapter=TOY,
            cache=TraceCache(tmp_path),
            versions=versions,
        )

    for computed in (3, 0):
        tracers = TracerPool(cached, most=2)
        two, three, four = spec(allocations=2), spec(allocations=3), spec(allocations=4)
        tracers.expect([two, three, four])
        assert tracers.trace(two).peak_bytes == 3
        assert tracers.trace(three).peak_bytes == 6
        assert tracers.trace(four).peak_bytes == 10
        assert tracers.traced == computed
        tracers.close()

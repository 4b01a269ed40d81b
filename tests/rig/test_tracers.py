"""Several processes that follow steps: what is expected is followed once, and what fails is told to whom asks."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import CannotPredict, RigError
from autotune.rig.trace_cache import TraceCache
from autotune.rig.tracer import Tracer
from autotune.rig.tracers import Tracers
from tests.rig.toys import tree_of

TOY = str(Path(__file__).parent / "toy_trace.py")


def make(versions: Mapping[str, str] | None) -> Tracer:
    return Tracer(Path(sys.executable), adapter=TOY, trace_seconds=20.0, versions=versions)


@pytest.fixture(name="tracers")
def two_tracers() -> Iterator[Tracers]:
    tracers = Tracers(make, most=2)
    yield tracers
    tracers.close()


def spec(**more: Any) -> dict[str, Any]:
    return {"model": {"name": "made/up", "folder": None}, **more}


def test_what_is_expected_is_shared_among_processes_and_followed_once(tracers: Tracers) -> None:
    wanted = [spec(allocations=count) for count in range(2, 12)]
    tracers.expect([*wanted, *wanted])
    traces = [tracers.trace(one) for one in wanted]
    assert [trace.peak_bytes for trace in traces] == [sum(range(1, count + 1)) for count in range(2, 12)]
    assert tracers.traced == len(wanted)
    assert len({trace.effective["pid"] for trace in traces}) == 2


def test_one_question_alone_starts_one_process(tracers: Tracers) -> None:
    assert tracers.trace(spec()).effective["pid"] == tracers.trace(spec(allocations=5)).effective["pid"]


def test_what_fails_is_told_to_whom_asks_for_it_and_to_nobody_else(tracers: Tracers) -> None:
    tracers.expect([spec(do="untraceable"), spec(do="die"), spec(), spec(allocations=4)])
    assert tracers.trace(spec(allocations=4)).peak_bytes == 10
    assert tracers.trace(spec()).peak_bytes == 6
    with pytest.raises(CannotPredict, match="custom::op"):
        tracers.trace(spec(do="untraceable"))
    with pytest.raises(RigError, match="ended by signal 9"):
        tracers.trace(spec(do="die"))


def test_closing_ends_what_is_being_followed_at_once(tracers: Tracers) -> None:
    tracers.expect([spec(do="hang"), spec(do="hang", allocations=2), spec()])
    deadline = time.monotonic() + 20.0
    while len(tree_of(os.getpid())) < 4 and time.monotonic() < deadline:  # two keepers, and a process that each forked
        time.sleep(0.02)
    began = time.monotonic()
    tracers.close()
    assert time.monotonic() - began < 10.0, "nobody waited for what hangs"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tracer")]
    assert tracers.trace(spec()).peak_bytes == 6, "and the next question starts anew"


def test_what_was_kept_starts_nothing_but_a_look_at_the_versions(tmp_path: Path) -> None:
    def kept(versions: Mapping[str, str] | None) -> Tracer:
        return Tracer(Path(sys.executable), adapter=TOY, cache=TraceCache(tmp_path), versions=versions)

    for followed in (3, 0):
        tracers = Tracers(kept, most=2)
        wanted = [spec(allocations=count) for count in (2, 3, 4)]
        tracers.expect(wanted)
        assert [tracers.trace(one).peak_bytes for one in wanted] == [3, 6, 10]
        assert tracers.traced == followed
        tracers.close()

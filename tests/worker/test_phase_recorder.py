"""Clocks, peaks and memory extrapolation, without a framework."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest

from tests.worker.drive import events_stage, inside

MIB = 2**20


class ManualClock:
    """Clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ManualMeter:
    """Meter with values set by hand."""

    def __init__(self) -> None:
        self.held = self.peak = 0

    def now(self) -> int:
        return self.held

    def take_peak(self) -> int:
        peak, self.peak = max(self.peak, self.held), self.held
        return peak

    def take_torch(self) -> dict[str, int | None] | None:
        return None

    def totals(self) -> dict[str, None]:
        return {"torch_allocated_bytes": None}

    def close(self) -> None: ...


@pytest.fixture
def staged() -> tuple[Any, list[dict[str, Any]], ManualClock, ManualMeter]:
    clock = ManualClock()
    meter = ManualMeter()
    stage, events = events_stage(clock=clock, meter=meter)
    return stage, events, clock, meter


def test_seconds_are_exclusive_and_sum_to_the_wall(staged: Any) -> None:
    stage, events, clock, _ = staged
    clock.now = 1.0
    with stage.inside("rollout"):
        clock.now = 3.0
        with stage.inside("sync"):
            clock.now = 7.0
        clock.now = 8.0
    stage.enter("optimizer")
    clock.now = 10.0
    stage.leave()
    clock.now = 11.0
    seconds = stage.seconds()
    assert {name: value for name, value in seconds.items() if value} == {
        "rollout": 3,
        "sync": 4,
        "optimizer": 2,
        "other": 2,
    }
    assert sum(seconds.values()) == 11
    assert [event["phase"] for event in events] == ["rollout", "sync", "rollout", "optimizer"]


def test_an_exception_leaves_its_phase_until_the_next_request(staged: Any) -> None:
    stage = staged[0]
    with pytest.raises(ZeroDivisionError), stage.inside("forward"), stage.inside("sync"):
        _ = 1 / 0
    assert stage.phase == "sync"
    stage.begin()
    assert stage.phase is None


def test_the_end_of_a_phase_closes_inner_phases_of_caught_exceptions(staged: Any) -> None:
    stage = staged[0]
    with stage.inside("reward"):
        with pytest.raises(KeyError), stage.inside("score"):
            raise KeyError
        assert stage.phase == "score"
    assert stage.phase is None


def test_peaks_by_phase(staged: Any) -> None:
    stage, _, _, meter = staged
    with stage.inside("rollout"):
        meter.held = 5
    with stage.inside("backward"):
        meter.peak, meter.held = 9, 3
    memory = stage.memory()
    assert memory["peak_bytes"] == 9
    assert memory["phase_peak_bytes"] == {"rollout": 5, "backward": 9}


def test_an_unknown_phase_is_refused(staged: Any) -> None:
    with pytest.raises(ValueError, match="'lunch' is not one of"):
        staged[0].enter("lunch")


def meters() -> list[Any]:
    module = inside("process_memory")
    return [module.HighWaterMeter, module.SamplingMeter]


@pytest.mark.parametrize("which", [0, 1], ids=["high-water mark", "sampling"])
def test_a_past_peak_is_reported_once(which: int) -> None:
    meter = meters()[which]()
    try:
        # what earlier tests left would be freed in between, and hide a part of the block
        gc.collect()
        before = meter.now()
        meter.take_peak()
        block = bytearray(64 * MIB)
        del block
        gc.collect()
        if which == 0:  # the other one may miss what was short
            assert 60 * MIB < meter.take_peak() - before < 80 * MIB
        meter.take_peak()
        assert meter.take_peak() - before < 16 * MIB
        kept = bytearray(64 * MIB)
        assert 60 * MIB < meter.take_peak() - before < 80 * MIB
        del kept
    finally:
        meter.close()


def test_without_a_resettable_mark_the_meter_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = inside("process_memory")
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    meter = memory.cpu_meter()
    assert type(meter) is memory.SamplingMeter
    thread = meter._thread
    time.sleep(20 * meter.INTERVAL_SECONDS)  # it has looked
    del meter  # nobody closes it: the thread ends with its meter
    thread.join(timeout=30)
    assert not thread.is_alive()


def walk(
    limit: int | None,
    total: int,
    held: Any,
) -> str | None:
    """Return the extrapolation's error over work whose memory is `held(done)`."""
    trend = inside("phase_recorder")
    memory = {"now": 0}
    watch = trend.Trend(limit, lambda: memory["now"])
    try:
        for done in range(1, total):
            memory["now"] = held(done)
            watch.progress(done, total, "token")
    except trend.LimitForeseen as error:
        assert isinstance(error, MemoryError)
        return f"{done}: {error}"
    return None


def test_growth_that_must_cross_the_limit_is_foreseen_at_a_quarter_of_the_way() -> None:
    message = walk(2000, 256, lambda done: 100 + 10 * done)
    assert message is not None
    done = int(message.split(":")[0])
    assert 64 <= done <= 72
    assert (
        f"at token {done} of 256 memory is {100 + 10 * done} bytes and grows by 10 bytes a token"
        in message
    )
    assert "it reaches 2660 bytes, over the limit of 2000 bytes" in message


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("fits", lambda done: 100 + 7 * done),
        ("steps down", lambda done: 1500 if done < 20 else 600),
        ("stops growing", lambda done: 100 + 30 * min(done, 50)),
        ("grows in rare steps", lambda done: 200 + 400 * (done // 100)),
    ],
)
def test_work_that_may_fit_continues(name: str, held: Any) -> None:
    assert walk(2000, 256, held) is None


def test_memory_over_the_limit_ends_the_work() -> None:
    message = walk(2000, 256, lambda done: 100 if done < 30 else 2001)
    assert message is not None
    assert "memory is 2001 bytes, over the limit of 2000 bytes" in message


def test_without_a_limit_nothing_is_foreseen() -> None:
    assert walk(None, 256, lambda done: 10**15 * done) is None


def test_few_layers_are_enough() -> None:
    assert "at token 4 of 12" in str(walk(1000, 12, lambda done: 100 * done))

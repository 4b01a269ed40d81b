"""Trend of a soak and its extrapolation to the end of a run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.measurement import (
    Cost,
    CycleMemory,
    Failure,
    LoopActivity,
    Measurement,
    Memory,
    Outcome,
)
from autotune.core.memory_growth import (
    MIN_CYCLES,
    SOAK_WARMUP_CYCLES,
    assess_soak,
    describe_soak,
    growth_of,
)
from autotune.core.units import MIB

LIMIT = 1000 * MIB


def cycles(
    count: int,
    *,
    per_step: float = 0.0,
    noise: float = 0.0,
    start: float = 500 * MIB,
    seed: int = 0,
) -> tuple[CycleMemory, ...]:
    draw = random.Random(seed)
    peaks = [round(start + per_step * 2 * at + draw.uniform(-noise, noise)) for at in range(count)]
    return tuple(
        CycleMemory(
            steps=2 * (at + 1),
            seconds=at + 1.0,
            peak_bytes=peak,
            held_bytes=peak,
        )
        for at, peak in enumerate(peaks)
    )


def soaked(ran: tuple[CycleMemory, ...], *, outcome: Outcome = Outcome.OK) -> Measurement:
    failure = None if outcome is Outcome.OK else Failure(evidence="CUDA out of memory")
    peak = max(cycle.peak_bytes for cycle in ran)
    memory = Memory(
        peak_bytes=peak,
        limit_bytes=LIMIT,
        bound_by="cgroup-v2",
    )
    exercised = LoopActivity(
        optimizer_steps=ran[-1].steps,
        generations=len(ran),
        seconds=ran[-1].seconds,
        cycles=ran,
    )
    return Measurement(
        candidate_id="x",
        outcome=outcome,
        memory=memory,
        cost=Cost(total_seconds=1, load_seconds=0),
        exercised=exercised,
        failure=failure,
        optimizer_steps=ran[-1].steps,
    )


@given(st.integers(-8 * MIB, 8 * MIB), st.integers(MIN_CYCLES, 40))
def test_growth_without_noise_is_exact(per_step: int, count: int) -> None:
    growth = growth_of(cycles(count, per_step=per_step))
    assert growth is not None
    assert growth.low == growth.bytes_per_step == growth.high == pytest.approx(per_step, abs=1)


def test_the_interval_has_its_nominal_coverage() -> None:
    covered = 0
    for seed in range(400):
        growth = growth_of(
            cycles(
                20,
                per_step=MIB,
                noise=10 * MIB,
                seed=seed,
            )
        )
        assert growth is not None
        covered += growth.low <= MIB <= growth.high
    assert covered / 400 >= 0.97


def test_one_jump_is_no_growth() -> None:
    level = [*cycles(8), *cycles(8, start=520 * MIB)]
    level = [
        CycleMemory(
            steps=2 * at + 2,
            seconds=at,
            peak_bytes=c.peak_bytes,
            held_bytes=0,
        )
        for at, c in enumerate(level)
    ]
    flat = growth_of(level[:8])
    assert flat is not None and not flat.is_certain
    assert growth_of(level[: MIN_CYCLES - 1]) is None


def test_noise_is_rarely_taken_for_growth() -> None:
    alarms = [
        assess_soak(soaked(cycles(20, noise=5 * MIB, seed=seed)), 10**6).verdict != "held"
        for seed in range(400)
    ]
    assert sum(alarms) <= 0.015 * 400


def test_a_level_run_holds() -> None:
    assessment = assess_soak(soaked(cycles(20, noise=MIB // 2)), projected_steps=10**6)
    assert (assessment.verdict, assessment.holds) == ("held", True)
    assert "no growth beyond doubt" in describe_soak(assessment)


def test_growth_that_reaches_the_limit_before_the_end_does_not_hold() -> None:
    ran = cycles(20, per_step=MIB)
    assert assess_soak(soaked(ran), projected_steps=1000).verdict == "would cross"
    assert assess_soak(soaked(ran), projected_steps=300).verdict == "held"
    unknown = assess_soak(soaked(ran), projected_steps=None)
    assert unknown.verdict == "held"
    assert "not known" in unknown.why


def test_a_run_that_broke_did_not_hold() -> None:
    assert assess_soak(soaked(cycles(9), outcome=Outcome.OOM_BACKWARD), None).verdict == "crossed"
    assert assess_soak(soaked(cycles(9, start=2 * LIMIT)), None).verdict == "crossed"


def test_too_few_cycles_say_nothing() -> None:
    assessment = assess_soak(
        soaked(cycles(SOAK_WARMUP_CYCLES + MIN_CYCLES - 1, per_step=10 * MIB)), 10**6
    )
    assert (assessment.verdict, assessment.growth) == ("too short", None)

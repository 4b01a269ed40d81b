"""Confirmations in pairs: drift of the machine cancels, and the turns are A B B A."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from autotune.core.answer import Recommendation
from autotune.core.measurement import Measurement, ProbePlan, Speed
from autotune.core.run_statistics import RunSpread, compare_pairs
from autotune.core.space import Candidate
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import open_study
from tests.inline_executor import InlineExecutor
from tests.search.test_choice import Noisy, Sharded, _space
from tests.simulated import MIB, toy_job

SPREAD = RunSpread(
    deviation=0.05,
    freedom=4.0,
    repeats=0,
    step_deviation=0.05,
)


def speed_of(rate: float) -> Speed:
    return Speed(
        completion_tokens=8,
        cycle_seconds=(1.0,) * 5,
        cycle_loss_tokens=(round(rate),) * 5,
        prompt_tokens=0,
        phase_seconds={},
    )


def test_a_drift_that_both_runs_of_a_pair_have_changes_nothing() -> None:
    steady = compare_pairs([(speed_of(1100), speed_of(1000))] * 4, SPREAD)
    slowing = []
    for pace in (1.0, 0.8, 0.6, 0.5):
        slowing.append((speed_of(11_000 * pace), speed_of(10_000 * pace)))
    drifting = compare_pairs(slowing, SPREAD)
    assert steady.value == pytest.approx(1.1)
    assert drifting.value == pytest.approx(1.1)
    assert drifting.low == pytest.approx(steady.low)
    apart = SPREAD.compare(speed_of(1100), speed_of(500))
    assert apart.value == pytest.approx(2.2), "the first of one and the last of the other"


def test_the_interval_of_equal_pairs_is_that_worked_out_by_hand() -> None:
    """Four pairs of ratio 1.1: σ² = 4 · 2 · 0.05² / 7, and t of 7 degrees at 99 % is 2.998."""
    ratio = compare_pairs([(speed_of(1100), speed_of(1000))] * 4, SPREAD)
    error = math.sqrt(8 * 0.0025 / 7 / 4)
    assert math.log(ratio.value / ratio.low) == pytest.approx(2.998 * error, rel=0.01)


@dataclass
class Slowing(Noisy):
    """Machine that gets slower from run to run."""

    drift: float = 0.9
    began: list[str] = field(default_factory=list)

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        measurement = super().measure(candidate, plan)
        assert measurement.worst is not None
        if plan.timed_cycles > 3:
            self.began.append(str(candidate.knobs["sharding"]))
        pace = self.drift ** len(self.began)
        cycles = tuple(seconds / pace for seconds in measurement.worst.cycle_seconds)
        return replace(measurement, worst=replace(measurement.worst, cycle_seconds=cycles))


def searched(
    folder: Path,
    machine: Noisy,
    seconds: float = 600.0,
) -> Recommendation:
    job = toy_job(folder, _space("zero2", "ddp"), 900 * MIB, storage="memory://")
    trainer = Sharded()
    return run_search(
        job,
        study=open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer)),
        executor=InlineExecutor(machine.measure),
        listener=lambda event: None,
        clock=Clock(seconds),
    )


def test_a_small_gain_is_found_on_a_machine_that_slows_down_by_more(tmp_path: Path) -> None:
    machine = Slowing(
        limit_bytes=900 * MIB,
        gains={"ddp": 1.2},
        noise=0.01,
    )
    answer = searched(tmp_path, machine)
    assert answer.winner is not None
    assert answer.winner.candidate.knobs["sharding"] == "ddp"
    assert answer.advantage is not None
    assert answer.advantage.ratio == pytest.approx(1.2, rel=0.1)
    assert machine.began[:4] in (
        ["ddp", "zero2", "zero2", "ddp"],
        ["ddp", "zero2"],
    ), "the turns of a pair are interleaved"


def test_equals_on_a_machine_that_slows_down_keep_the_baseline(tmp_path: Path) -> None:
    keeping = 0
    for seed in range(10):
        machine = Slowing(
            limit_bytes=900 * MIB,
            noise=0.02,
            dice=random.Random(seed),
        )
        answer = searched(tmp_path, machine)
        assert answer.winner is not None
        keeping += answer.winner.candidate.knobs["sharding"] == "zero2"
    assert keeping >= 9

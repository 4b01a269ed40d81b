"""Speed by phase: a phase's error transfers to other candidates; a cliff belongs to its load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.core.answer import Trial
from autotune.core.measurement import Cost, Measurement, Memory, Outcome, Phase, Speed, judge
from autotune.core.prediction import Estimate, PhasePrediction, Prediction
from autotune.core.space import Candidate
from autotune.search.loop import legal_candidates
from autotune.search.surrogate.candidate_table import CandidateTable
from autotune.search.surrogate.throughput_model import ThroughputModel
from tests.simulated import MIB, ToyTrainer, toy_job, toy_space

SPACE = toy_space(num_generations=(8,), max_completion_length=(64,))
CANDIDATES = legal_candidates(toy_job(Path("/nowhere"), SPACE, 1), ToyTrainer())
TABLE = CandidateTable(SPACE, CANDIDATES)
NOBODY = np.zeros(0, dtype=np.int64)
NOISE = 0.03  # Standard deviation between two runs
TOKENS = 1000
SECONDS: Mapping[Phase, float] = {"rollout": 6.0, "forward": 1.0, "backward": 2.0, "optimizer": 1.0}


def within(value: float) -> Estimate:
    return Estimate(
        value=value,
        low=0.7 * value,
        high=1.4 * value,
    )


def predicted(candidate: Candidate) -> Prediction:
    size = within(100 * MIB)
    rate = within(TOKENS / sum(SECONDS.values()))
    phases = tuple(
        PhasePrediction(
            name=name,
            peak_bytes=size,
            seconds=within(value),
        )
        for name, value in SECONDS.items()
    )
    return Prediction(
        candidate_id=candidate.id,
        basis="traced",
        fits=True,
        limit_bytes=1000 * MIB,
        peak_memory_bytes=size,
        torch_peak_allocated_bytes=size,
        torch_peak_reserved_bytes=size,
        tokens_per_second=rate,
        phases=phases,
    )


def measured(candidate: Candidate, **off: float) -> Trial:
    """Return the prediction with some phases scaled."""
    seconds: dict[str, float] = {}
    for name, value in SECONDS.items():
        seconds[name] = value * off.get(name, 1.0)
    cycle = sum(seconds.values())
    speed = Speed(
        completion_tokens=TOKENS,
        cycle_seconds=(cycle,),
        cycle_loss_tokens=(TOKENS,),
        prompt_tokens=0,
        phase_seconds=seconds,
    )
    measurement = Measurement(
        candidate_id=candidate.id,
        outcome=Outcome.OK,
        worst=speed,
        cost=Cost(total_seconds=cycle, load_seconds=0.0),
        memory=Memory(
            peak_bytes=MIB,
            limit_bytes=1000 * MIB,
            bound_by="formula",
        ),
    )
    return Trial(
        number=0,
        purpose="search",
        candidate=candidate,
        measurement=measurement,
        verdict=judge(measurement),
    )


def share(value: float) -> Candidate:
    return next(candidate for candidate in CANDIDATES if candidate.knobs.get("share") == value)


def rates(*trials: Trial) -> Mapping[str, float]:
    predictions = list(map(predicted, CANDIDATES))
    believed = ThroughputModel(TABLE, predictions).posterior(trials, NOBODY, NOISE)
    rate_by_id = {}
    for index, candidate in enumerate(CANDIDATES):
        rate_by_id[candidate.id] = math.exp(believed.mean[index])
    return rate_by_id


def test_before_anything_is_measured_it_is_the_prediction() -> None:
    for rate in rates().values():
        assert rate == pytest.approx(TOKENS / 10)


def test_a_phases_error_transfers_to_the_same_phase_of_other_candidates() -> None:
    rate_by_id = rates(measured(CANDIDATES[0], rollout=1.5), measured(CANDIDATES[5], rollout=1.5))
    assert rate_by_id[CANDIDATES[0].id] == pytest.approx(TOKENS / 13, rel=0.02)
    assert rate_by_id[CANDIDATES[-1].id] == pytest.approx(TOKENS / 13, rel=0.1), (
        "three seconds more of rollout, and of nothing else"
    )


def test_an_error_of_all_phases_is_that_of_the_machine() -> None:
    """An engine's rollout was never measured; that of transformers, and training, are twice as
    fast as predicted.
    """
    plain = next(candidate for candidate in CANDIDATES if not candidate.knobs["use_vllm"])

    def plain_rate(**off: float) -> float:
        return rates(measured(plain, **off))[share(0.2).id]

    aligned = plain_rate(
        rollout=0.5,
        forward=0.5,
        backward=0.5,
    )
    opposed = plain_rate(
        rollout=0.5,
        forward=1.5,
        backward=1.5,
    )
    assert aligned > 1.5 * TOKENS / 10
    assert opposed < 1.3 * TOKENS / 10


def test_a_cliff_is_that_of_the_load_and_of_no_other() -> None:
    """An engine whose cache holds one sequence at a time."""
    thrashing, unmeasured = share(0.1), share(0.2)
    rate_by_id = rates(measured(thrashing, rollout=20.0))
    for candidate in CANDIDATES:
        if candidate.load_key == thrashing.load_key:
            assert rate_by_id[candidate.id] == pytest.approx(TOKENS / 124, rel=0.02)
    assert rate_by_id[unmeasured.id] == pytest.approx(TOKENS / 10, rel=0.02)


def test_one_slow_cycle_says_little_about_the_others_of_its_load() -> None:
    """A probe that was stopped after its first cycle: a neighbour on the machine may have held
    it up.
    """
    stopped = measured(share(0.1), rollout=20.0)
    speed = stopped.measurement.worst
    assert speed is not None
    stopped = replace(
        stopped, measurement=replace(stopped.measurement, worst=replace(speed, cut_short=True))
    )
    sure = rates(measured(share(0.1), rollout=20.0))
    doubtful = rates(stopped)
    same_load = []
    for candidate in CANDIDATES:
        if candidate.load_key == share(0.1).load_key and candidate != share(0.1):
            same_load.append(candidate)
    assert same_load
    for candidate in same_load:
        assert sure[candidate.id] < TOKENS / 100 < TOKENS / 40 < doubtful[candidate.id]


def test_a_measured_candidate_without_a_cliff_keeps_its_speed() -> None:
    thrashing = share(0.1)
    safe = next(
        candidate
        for candidate in CANDIDATES
        if candidate.load_key == thrashing.load_key and candidate != thrashing
    )
    rate_by_id = rates(measured(thrashing, rollout=20.0), measured(safe))
    assert rate_by_id[safe.id] == pytest.approx(TOKENS / 10, rel=0.02)


def test_one_without_a_prediction_leaves_the_others_theirs() -> None:
    """Baseline without a prediction."""
    predictions = [None, *map(predicted, CANDIDATES[1:])]
    assert ThroughputModel.has_phase_times(predictions)
    believed = ThroughputModel(TABLE, predictions).posterior(
        [measured(CANDIDATES[1], rollout=1.5)], NOBODY, NOISE
    )
    assert math.exp(believed.mean[1]) == pytest.approx(TOKENS / 13, rel=0.05)
    assert believed.deviation[0] > believed.deviation[2]
    assert not ThroughputModel.has_phase_times([None, None])


def test_a_probe_counts_less_where_runs_differ_more() -> None:
    """Eight candidates are predicted alike, the first was measured 30 % faster than the others.
    With runs that differ by 0.005 it is about as fast as measured, with 0.2 it was a lucky run.
    """
    trials = [measured(CANDIDATES[0], rollout=0.7, forward=0.7, backward=0.7)]
    trials += [measured(candidate) for candidate in CANDIDATES[1:8]]
    row = TABLE.row_by_id[CANDIDATES[0].id]

    def lead(noise: float) -> float:
        model = ThroughputModel(TABLE, list(map(predicted, CANDIDATES)))
        posterior = model.posterior(trials, NOBODY, noise)
        others = posterior.mean[TABLE.rows_of(CANDIDATES[1:8])]
        return float(posterior.mean[row] - others.mean())

    assert lead(0.005) > 0.25
    assert lead(0.2) < 0.1


def test_a_speed_without_phases_is_an_error_of_all_phases() -> None:
    without_phases = measured(CANDIDATES[0], **dict.fromkeys(SECONDS, 2.0))
    assert without_phases.measurement.worst is not None
    bare = replace(
        without_phases.measurement,
        worst=replace(without_phases.measurement.worst, phase_seconds={}),
    )
    assert rates(replace(without_phases, measurement=bare)) == pytest.approx(
        rates(without_phases), rel=1e-6
    )


def test_candidates_that_are_predicted_equal_may_still_differ() -> None:
    """Their errors have most in common, and something of their own: 2 to 20 % of the speed."""
    predictions = list(map(predicted, CANDIDATES))
    first, second = share(0.1), share(0.2)
    posterior = ThroughputModel(TABLE, predictions).posterior([measured(first)], NOBODY, NOISE)
    _, deviation = posterior.lead_over(TABLE.row_by_id[first.id])
    assert 0.02 < deviation[TABLE.row_by_id[second.id]] < 0.2

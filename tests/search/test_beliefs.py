"""What is believed of a measured candidate: its estimate and its confirmations, worked out by
hand.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotune.core.answer import Trial
from autotune.core.headroom import Headroom
from autotune.core.measurement import Outcome, Phase, ProbePlan, Speed, judge
from autotune.core.prediction import Estimate
from autotune.core.run_statistics import RunSpread
from autotune.search.acquisition import seconds_to_measure
from autotune.search.affordable import affordable
from autotune.search.loop import SHORT_PROBE, legal_candidates
from autotune.search.measured_trial import _predicted_cycle
from autotune.search.problem import search_problem
from autotune.search.speed_comparison import as_fast_as, compare
from autotune.search.surrogate.throughput_model import ThroughputModel
from autotune.search.trial_view import SearchProblem, TrialView
from tests.search.test_throughput_model import CANDIDATES as TIMED
from tests.search.test_throughput_model import NOBODY, NOISE, TABLE, TOKENS, predicted
from tests.search.test_throughput_model import measured as timed
from tests.simulated import MIB, Machine, ToyTrainer, toy_job, toy_space

LONG_PROBE = ProbePlan(warmup_cycles=1, timed_cycles=5)
MACHINE = Machine(limit_bytes=1000 * MIB)
JOB = toy_job(Path("/nowhere"), toy_space(), MACHINE.limit_bytes)
CANDIDATES = legal_candidates(JOB, ToyTrainer())
FITTING = [candidate for candidate in CANDIDATES if MACHINE.need(candidate) < 700 * MIB]


def problem(**changes: Any) -> SearchProblem:
    baseline = changes.pop("baseline", None)
    return replace(search_problem(JOB, CANDIDATES, baseline), **changes)


def trial(
    candidate: Any,
    number: int = 0,
    *,
    purpose: Any = "search",
    rate: float | None = None,
    outcome: Outcome = Outcome.OK,
) -> Trial:
    plan = LONG_PROBE if purpose == "confirm" else SHORT_PROBE
    machine = replace(MACHINE, outcomes={candidate.id: outcome})
    measurement = machine.measure(candidate, plan)
    if rate is not None and measurement.worst is not None:
        speed = replace(
            measurement.worst,
            cycle_seconds=(1e6,),
            cycle_loss_tokens=(round(1e6 * rate),),
        )
        measurement = replace(measurement, worst=speed)
    return Trial(
        number=number,
        purpose=purpose,
        candidate=candidate,
        measurement=measurement,
        verdict=judge(measurement),
    )


def view_with_estimate(trials: list[Trial]) -> Any:
    """Return a view in which every candidate is estimated at log speed 0 ± 0.1, noise 0.1."""
    view: Any = TrialView(problem(), trials)
    speed = SimpleNamespace(
        mean=np.zeros(len(view.table)),
        deviation=np.full(len(view.table), 0.1),
    )
    view.estimates = SimpleNamespace(speed=speed)
    view.run_spread = RunSpread(deviation=0.1, freedom=4.0, repeats=0, step_deviation=0.1)
    return view


@pytest.mark.parametrize(
    ("confirmed_logs", "mean", "deviation"),
    [
        # Within 2 · √(0.1² + 0.1²) = 0.283 both count 1 / 0.1² = 100: the middle, ± √(1 / 200).
        ([0.2], 0.1, 0.07071),
        # Two confirmations count 200: two thirds of the way, ± √(1 / 300).
        ([0.2, 0.2], 0.13333, 0.05774),
        # 0.6 is 0.317 beyond: the estimate counts 1 / (0.01 + 0.317²) = 9.03.
        ([0.6], 0.55029, 0.09577),
        ([-0.6], -0.55029, 0.09577),
    ],
)
def test_a_belief_weighs_the_estimate_and_the_confirmations_by_precision(
    confirmed_logs: list[float],
    mean: float,
    deviation: float,
) -> None:
    candidate = FITTING[0]
    probe = trial(candidate)
    confirmations = [
        trial(candidate, number, purpose="confirm", rate=math.exp(log_speed))
        for number, log_speed in enumerate(confirmed_logs, 1)
    ]
    belief = view_with_estimate([probe, *confirmations]).belief(probe)
    assert belief == pytest.approx((mean, deviation), rel=1e-3)


def test_a_confirmation_without_tokens_leaves_the_estimate() -> None:
    probe = trial(FITTING[0])
    silent = trial(FITTING[0], 1, purpose="confirm", rate=0.0)
    assert view_with_estimate([probe, silent]).belief(probe) == (0.0, 0.1)


def test_a_candidate_whose_confirmation_ran_out_is_no_contender() -> None:
    """Its probe fitted, and leaves the headroom: the confirmation decides."""
    refuted, rival = FITTING[:2]
    trials = [
        trial(refuted),
        trial(rival, 1),
        trial(refuted, 2, purpose="confirm", outcome=Outcome.OOM_BACKWARD),
    ]
    view = TrialView(problem(), trials)
    contenders = [contender.candidate for tier in view.tiers for contender in view.contenders(tier)]
    assert contenders == [rival]


def test_a_confirmation_that_leaves_too_little_is_no_contender_either() -> None:
    candidate = FITTING[0]
    probe = trial(candidate)
    confirmed = trial(candidate, 1, purpose="confirm")
    memory = replace(confirmed.measurement.memory, peak_bytes=950 * MIB)
    measurement = replace(confirmed.measurement, memory=memory)
    confirmed = replace(confirmed, measurement=measurement, verdict=judge(measurement))
    for least_mib, count in ((40, 1), (60, 0)):
        headroom = Headroom(least_bytes=least_mib * MIB)
        view = TrialView(problem(headroom=headroom), [probe, confirmed])
        assert sum(len(view.contenders(tier)) for tier in view.tiers) == count, least_mib


# What a probe costs.


def loaded_probe(candidate: Any, **parts: Any) -> Trial:
    """Return a probe of 30 seconds, 20 of which its load took."""
    probe = trial(candidate, **parts)
    cost = replace(probe.measurement.cost, total_seconds=30.0, load_seconds=20.0)
    return replace(probe, measurement=replace(probe.measurement, cost=cost))


def test_the_last_load_is_ready_unless_it_ran_out_of_memory() -> None:
    """After an out-of-memory error the process is gone, and each candidate loads."""
    last = next(candidate for candidate in FITTING if candidate.knobs["use_vllm"])
    same = next(member for member in FITTING if member.load_key == last.load_key and member != last)
    changed = next(member for member in FITTING if member.load_key != last.load_key)

    def load_seconds(outcome: Outcome) -> list[float]:
        view: Any = TrialView(problem(), [loaded_probe(last, outcome=outcome)])
        view.estimates = replace(view.estimates, fits=np.ones(len(view.table)))
        all_loads = {candidate.load_key for candidate in CANDIDATES}
        seconds = seconds_to_measure(view, ()) - seconds_to_measure(view, all_loads)
        return list(seconds[view.table.rows_of((same, changed))])

    assert load_seconds(Outcome.OK) == pytest.approx([0, 20])
    same_load, _ = load_seconds(Outcome.OOM_BACKWARD)
    assert same_load > 0, "its load is gone"


def test_a_baseline_that_stays_the_best_needs_no_confirmation() -> None:
    """A load and a probe take 20 + 10 seconds, two more probes 20: 50 together. Another incumbent
    has to be loaded again for its own confirmation, four probes: 20 + 10 + 20 + 40 = 90.
    """
    engine = [candidate for candidate in FITTING if candidate.knobs["use_vllm"]]
    plain = [candidate for candidate in FITTING if not candidate.knobs["use_vllm"]]
    incumbent = engine[0]
    pool = np.array([TABLE_ROWS[plain[0].id]])
    for baseline, enough in ((incumbent, 60.0), (None, 100.0)):
        view: Any = TrialView(problem(baseline=baseline), [loaded_probe(incumbent)])
        view.estimates = _equally_fast(view, MACHINE.speed(incumbent))
        assert len(affordable(pool, view, enough, ())) == 1, baseline
        assert len(affordable(pool, view, enough - 20, ())) == 0, baseline


def test_the_incumbents_own_probe_says_how_long_its_confirmation_takes() -> None:
    """Its probe took 50 seconds, other ones 10: after a probe on its load, which takes 10, its
    confirmation needs 4 * 50, not 4 * 10.
    """
    with_engine = [candidate for candidate in FITTING if candidate.knobs["use_vllm"]]
    incumbent = with_engine[0]
    incumbents_probe = loaded_probe(incumbent)
    cost = replace(incumbents_probe.measurement.cost, total_seconds=70.0)
    measurement = replace(incumbents_probe.measurement, cost=cost)
    incumbents_probe = replace(incumbents_probe, measurement=measurement)
    same_load = [rival for rival in with_engine if rival.load_key == incumbent.load_key]
    slower = [loaded_probe(rival, rate=1.0) for rival in same_load[1:3]]
    pool = np.array([TABLE_ROWS[same_load[3].id]])

    view: Any = TrialView(problem(baseline=None), [incumbents_probe, *slower])
    view.estimates = _equally_fast(view, MACHINE.speed(incumbent))

    assert view.best().candidate == incumbent
    assert len(affordable(pool, view, 230.0, ())) == 1
    assert len(affordable(pool, view, 150.0, ())) == 0


def _equally_fast(view: Any, rate: float) -> Any:
    speed = replace(view.estimates.speed, mean=np.full(len(view.table), math.log(rate)))
    return replace(view.estimates, speed=speed)


TABLE_ROWS = search_problem(JOB, CANDIDATES, None).surrogate.table.row_by_id


# Speed by phase.


def test_a_probe_that_made_no_token_tells_nothing_of_the_speed() -> None:
    model = ThroughputModel(TABLE, [predicted(candidate) for candidate in TIMED])
    probe = timed(TIMED[0])
    assert probe.measurement.worst is not None
    silent = replace(probe.measurement.worst, cycle_loss_tokens=(0,), completion_tokens=0)
    without_tokens = replace(probe, measurement=replace(probe.measurement, worst=silent))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        believed = model.posterior([without_tokens], NOBODY, NOISE)
    assert np.exp(believed.mean) == pytest.approx(np.full(len(TABLE), TOKENS / 10))


def test_a_phase_that_hardly_takes_time_is_no_evidence_of_the_machine() -> None:
    """Six predicted seconds of rollout were over at once: the others are as predicted, and so is
    the machine. As evidence, log(1e-6) would make every phase faster.
    """
    model = ThroughputModel(TABLE, [predicted(candidate) for candidate in TIMED])
    cycle = model._cycle(timed(TIMED[0], rollout=1e-6))
    assert cycle is not None
    assert model._informative("rollout", [cycle]) == []
    assert model._informative("training", [cycle]) == [cycle]


def test_a_predicted_cycle_is_divided_like_its_phases() -> None:
    """100 tokens at 10 a second take 10 seconds: three quarters of them for 3 of 4 predicted."""
    timed_speed = Speed(
        completion_tokens=50,
        cycle_seconds=(1.0, 1.0),
        cycle_loss_tokens=(90, 100),
        prompt_tokens=7,
        phase_seconds={},
    )
    phases: dict[Phase, Estimate] = {
        "rollout": Estimate.exactly(3),
        "backward": Estimate.exactly(1),
    }
    cycle = _predicted_cycle(timed_speed, Estimate.exactly(10), phases)
    assert cycle is not None
    assert cycle.cycle_seconds == (10.0,)
    assert cycle.phase_seconds == {"rollout": 7.5, "backward": 2.5}
    without_phases = _predicted_cycle(timed_speed, Estimate.exactly(10), {})
    assert without_phases is not None and without_phases.phase_seconds == {"other": 10.0}
    assert _predicted_cycle(timed_speed, Estimate.exactly(0), phases) is None


def test_a_gain_beyond_three_percent_is_no_equal() -> None:
    """Intervals hold a ratio of 1, so that the spread excludes nothing: 2 % apart are equals, 4 %
    are not.
    """
    fastest, rival = [member for member in problem().tiers[0].candidates if member in FITTING][:2]
    for rate, count in ((102.0, 1), (104.0, 0)):
        trials = [
            trial(fastest, rate=0.8 * rate),  # runs of one candidate differ
            trial(rival, 1, rate=100.0),
            trial(fastest, 2, purpose="confirm", rate=rate),
        ]
        view = TrialView(problem(), trials)
        lead = compare(trials[2], trials[1], view)
        assert lead is not None and lead.low < 1 < lead.value == pytest.approx(rate / 100)
        assert len(as_fast_as(trials[2], view)) == count, rate

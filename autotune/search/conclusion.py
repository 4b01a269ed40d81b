"""Conclusion: the answer from everything measured, as a pure function, so that a recorded study can
be concluded again.

The baseline is kept unless the fastest candidate is faster by more than the spread between runs,
and a longer probe confirmed it. Among confirmed candidates with the same speed within that spread,
the simplest is taken.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.catalog import complexity
from autotune.core.answer import (
    Advantage,
    AdvantageKind,
    Change,
    Counts,
    Proven,
    Recommendation,
    Trial,
    without_result,
)
from autotune.core.job import Job
from autotune.core.measurement import Cost, Failure, Measurement, Memory, Outcome, judge
from autotune.core.run_statistics import SpeedRatio
from autotune.core.space import Candidate, KnobValue
from autotune.search.trial_view import TrialView, learning_values, speed_of

MAX_RUNNER_UPS = 4


def conclude(
    view: TrialView, job: Job, *, proven: Proven | None, loads: int, elapsed_seconds: float
) -> Recommendation:
    """Return the winner with its evidence; `proven` is None after an interruption."""
    (winner, advantage), tier = choose(view, finished=proven is not None), view.tier_of_choice()
    undecided = winner is None and proven in ("budget spent", "stopped improving")
    if winner is not None and proven == "no better candidate possible" and without_result(view.all):
        proven = "not all measured"
    behind = (
        [trial for trial in view.contenders(tier) if trial is not winner] if winner and tier else []
    )
    others = [view.confirmations.get(trial.candidate.id, trial) for trial in behind]
    return Recommendation(
        winner=winner,
        certificate=view.confirmations.get(winner.candidate.id) if winner else None,
        baseline=_baseline(view, job),
        learning=dict(tier.learning) if tier else {},
        runner_ups=tuple(sorted(others, key=speed_of, reverse=True)[:MAX_RUNNER_UPS]),
        trade_offs=tuple(
            found[0]
            for other in view.tiers
            if other is not tier and (found := view.contenders(other))
        ),
        changes=(
            changes_between(job, view.baseline, winner.candidate)
            if winner and view.baseline
            else ()
        ),
        relaxed=relaxed_in(job, winner.candidate) if winner else {},
        refuted=tuple(trial for trial in view.confirmations.values() if not trial.verdict.fits),
        counts=_counts(view, loads),
        proven="not proven infeasible" if undecided else proven or "interrupted",
        interrupted=proven is None,
        elapsed_seconds=elapsed_seconds,
        probe_seconds=sum(trial.measurement.cost.total_seconds for trial in view.all)
        * job.task.hardware.count,
        trials=view.all,
        advantage=advantage,
        run_spread=view.run_spread,
    )


def _baseline(view: TrialView, job: Job) -> Trial | None:
    """Return the baseline's confirmation if it was a finalist, else its probe, else the reason
    that it was not measured.
    """
    measured = next(
        (
            trial
            for trial in view.probes
            if trial.purpose == "baseline" or trial.candidate == view.baseline
        ),
        None,
    )
    if measured is not None:
        return view.confirmations.get(measured.candidate.id, measured)
    baseline = view.baseline
    if baseline is None:
        return None
    if baseline.id in view.implied:
        outcome, evidence = Outcome.IMPLIED, "a candidate that needs no more memory ran out of it"
    elif baseline.id in view.screened:
        outcome, evidence = Outcome.SCREENED, "predicted not to fit, so it was not measured"
    else:
        return None
    unmeasured = Measurement(
        candidate_id=baseline.id,
        outcome=outcome,
        memory=Memory(
            peak_bytes=None, limit_bytes=job.memory_limit_bytes, bound_by="nothing: it was not run"
        ),
        cost=Cost(total_seconds=0.0, load_seconds=0.0),
        failure=Failure(evidence=evidence),
    )
    return Trial(
        number=-1,
        purpose="baseline",
        candidate=baseline,
        measurement=unmeasured,
        verdict=judge(unmeasured),
    )


def _counts(view: TrialView, loads: int) -> Counts:
    outcomes = [trial.measurement.outcome for trial in view.all]
    refused = [trial for trial in view.probes if trial.purpose == "refused"]
    return Counts(
        candidates=sum(len(tier.candidates) for tier in view.tiers),
        screened=len(view.screened),
        implied=len(view.implied),
        probed=len(view.probes),
        out_of_memory=sum(outcome.is_out_of_memory for outcome in outcomes),
        failed=sum(outcome in ("crash", "timeout", "illegal") for outcome in outcomes),
        loads=loads,
        confirmations=sum(trial.purpose == "confirm" for trial in view.all),
        refused_probed=len(refused),
        false_refusals=sum(trial.verdict.fits for trial in refused),
    )


def relaxed_in(job: Job, chosen: Candidate) -> dict[str, KnobValue]:
    """Return the learning knobs that are not at their most preferred value; none in a search for
    speed alone.
    """
    if job.space.objective == "throughput":
        return {}
    values = learning_values(job.space, chosen)
    return {name: value for name, value in values.items() if value != job.space[name].choices[0]}


def changes_between(job: Job, baseline: Candidate, chosen: Candidate) -> tuple[Change, ...]:
    """Return every knob in which the two differ, with the reason; learning knobs first."""
    before, after = baseline.knobs, chosen.knobs
    names = [name for name in {**after, **before} if before.get(name) != after.get(name)]
    changes = []
    for name in names:
        knob = job.space[name]
        effect, why = knob.effect_under(chosen.settings), knob.says
        if effect == "learning":
            why = f"relaxed from {knob.choices[0]}, with which nothing fitted"
            if job.space.objective == "throughput":
                why = "searched for speed alone, as this space declares"
            elif after.get(name) == knob.choices[0]:
                why = "the space's preferred value, and it fits"
        changes.append(
            Change(
                name=name,
                baseline=before.get(name),
                recommended=after.get(name),
                effect=effect,
                why=why,
            )
        )
    return tuple(sorted(changes, key=lambda change: change.effect != "learning"))


# Share of speed that a simpler candidate may lose, even where the spread between runs is larger
MAX_SPEED_LOSS = 0.03
# Difference of predicted speeds, as a share, that a prediction can't resolve: the part of a phase's
# error that its candidates do not have in common (`surrogate.throughput_model`).
EQUAL_SPEED_SHARE = 0.05


def choose(view: TrialView, *, finished: bool) -> tuple[Trial | None, Advantage | None]:
    """Return the recommended trial and its speed compared with the baseline's, if one was
    measured at the same learning knobs. In a search that is not `finished` the best so far need
    not be confirmed.
    """
    fastest = view.best()
    if fastest is None:
        return None, None
    baseline = view.fitting_baseline()
    if baseline is None:
        return _simplest(fastest, view), None
    if (
        baseline.candidate == fastest.candidate
        or (ratio := compare(fastest, baseline, view)) is None
    ):
        return fastest, None
    unconfirmed = finished and fastest.candidate.id not in view.confirmations
    if ratio.low <= 1.0 or unconfirmed:
        why: AdvantageKind = "within the noise" if ratio.low <= 1.0 else "not confirmed"
        return baseline, _advantage(fastest, ratio, why)
    winner = _simplest(fastest, view, baseline)
    return winner, _advantage(winner, compare(winner, baseline, view) or ratio, "measurably faster")


def _advantage(trial: Trial, ratio: SpeedRatio, why: AdvantageKind) -> Advantage:
    return Advantage(
        candidate_id=trial.candidate.id, why=why, ratio=ratio.value, low=ratio.low, high=ratio.high
    )


def compare(one: Trial, other: Trial, view: TrialView) -> SpeedRatio | None:
    """Return the ratio of the best evidence about two candidates; None without both speeds."""
    first, second = (
        view.confirmations.get(trial.candidate.id, trial).measurement.ranking_speed
        for trial in (one, other)
    )
    if first is None or second is None:
        return None
    ratio = view.run_spread.compare(first, second)
    if (
        not one.measurement.emulated
    ):  # on emulated cards speeds are predicted, without a spread between runs
        return ratio
    return replace(
        ratio, low=ratio.value * (1 - EQUAL_SPEED_SHARE), high=ratio.value * (1 + EQUAL_SPEED_SHARE)
    )


def _simplest(fastest: Trial, view: TrialView, baseline: Trial | None = None) -> Trial:
    """Return the simplest confirmed candidate that is as fast as the fastest, and measurably
    faster than the baseline.
    """
    alike = [
        trial
        for trial in as_fast_as(fastest, view)
        if trial.candidate.id in view.confirmations
        and (
            baseline is None or (ratio := compare(trial, baseline, view)) is None or ratio.low > 1.0
        )
    ]
    return min([fastest, *alike], key=lambda trial: complexity(trial.candidate, view.baseline))


def as_fast_as(fastest: Trial, view: TrialView) -> list[Trial]:
    """Return the other trials of the tier that are as fast as the fastest confirmed one within
    the spread.
    """
    tier = view.tier_of_choice()
    if tier is None or fastest.candidate.id not in view.confirmations:
        return []
    others = [trial for trial in view.contenders(tier) if trial.candidate != fastest.candidate]
    pairs = ((trial, compare(fastest, trial, view)) for trial in others)
    return [
        trial
        for trial, ratio in pairs
        if ratio and ratio.low <= 1.0 and ratio.value <= 1 + MAX_SPEED_LOSS
    ]

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
from autotune.core.space import Candidate, Knob, KnobValue, SearchSpace
from autotune.search.agenda import MACHINE_OUTCOMES
from autotune.search.speed_comparison import as_fast_as, compare
from autotune.search.trial_view import Tier, TrialView, learning_values, speed_of

MAX_RUNNER_UPS = 4
FAILURES = (Outcome.CRASH, Outcome.TIMEOUT, Outcome.ILLEGAL)  # Other failures than for memory


def conclude(
    view: TrialView,
    job: Job,
    *,
    proven: Proven | None,
    loads: int,
    elapsed_seconds: float,
) -> Recommendation:
    """Return the winner with its evidence; `proven` is None after an interruption."""
    # 1. The winner, and what it is compared with.
    winner, advantage = choose(view, finished=proven is not None)
    tier = view.tier_of_choice()
    certificate: Trial | None = None
    runner_ups: list[Trial] = []
    changes: tuple[Change, ...] = ()
    relaxed: dict[str, KnobValue] = {}
    if winner is not None and tier is not None:
        certificate = view.confirmations.get(winner.candidate.id)
        runner_ups = _runner_ups(view, tier, winner)
        relaxed = relaxed_in(job, winner.candidate)
        if view.baseline is not None:
            changes = changes_between(job, view.baseline, winner.candidate)

    # 2. All trials, with the verdicts that hold at the end.
    trials = view.all
    if winner is None:  # also for those that fit and leave too little free, the reason is given
        trials = tuple(replace(trial, verdict=view.verdict_on(trial)) for trial in view.all)
    probe_seconds = sum(trial.measurement.cost.total_seconds for trial in view.all)
    return Recommendation(
        winner=winner,
        certificate=certificate,
        baseline=_baseline(view, job),
        learning=dict(tier.learning) if tier else {},
        runner_ups=tuple(runner_ups),
        trade_offs=tuple(_best_of_other_tiers(view, tier)),
        changes=changes,
        relaxed=relaxed,
        refuted=_refuted(view),
        counts=_counts(view, loads),
        proven=_what_is_proven(view, winner, proven),
        interrupted=proven is None,
        elapsed_seconds=elapsed_seconds,
        probe_seconds=probe_seconds * job.task.hardware.count,
        trials=trials,
        advantage=advantage,
        run_spread=view.run_spread,
    )


def _refuted(view: TrialView) -> tuple[Trial, ...]:
    """Return the confirmations that did not fit."""
    refuted = []
    for confirmation in view.confirmations.values():
        verdict = view.verdict_on(confirmation)
        if not verdict.fits:
            refuted.append(replace(confirmation, verdict=verdict))
    return tuple(refuted)


def _what_is_proven(
    view: TrialView,
    winner: Trial | None,
    proven: Proven | None,
) -> Proven:
    """Return the reason of the search's end, as far as the measurements support it.

    A probe that was ended from outside, crashed or took too long shows nothing about memory.
    """
    if proven is None:
        return "interrupted"
    exhausted = proven in ("no better candidate possible", "nothing fits")
    if exhausted and without_result(view.all):
        return "not all measured"
    if winner is not None:
        return proven
    failed = any(trial.measurement.outcome in MACHINE_OUTCOMES for trial in view.probes)
    if exhausted and not failed:
        return "nothing fits"
    return "not proven infeasible"


def _runner_ups(
    view: TrialView,
    tier: Tier,
    winner: Trial,
) -> list[Trial]:
    """Return the next best of the winner's tier, by confirmation if there is any."""
    evidence = []
    for trial in view.contenders(tier):
        if trial is not winner:
            evidence.append(view.evidence(trial))
    fastest_first = sorted(evidence, key=speed_of, reverse=True)
    return fastest_first[:MAX_RUNNER_UPS]


def _best_of_other_tiers(view: TrialView, tier_of_choice: Tier | None) -> list[Trial]:
    best = []
    for tier in view.tiers:
        contenders = view.contenders(tier)
        if contenders and tier is not tier_of_choice:
            best.append(contenders[0])
    return best


def _baseline(view: TrialView, job: Job) -> Trial | None:
    """Return the baseline's confirmation if it was a finalist, else its probe, else the reason
    that it was not measured.
    """
    baseline = view.baseline
    for trial in view.probes:
        is_measured_baseline = trial.purpose == "baseline" or trial.candidate == baseline
        if is_measured_baseline:
            return view.evidence(trial)
    if baseline is None:
        return None
    if baseline.id in view.implied:
        outcome = Outcome.IMPLIED
        evidence = "a candidate that needs no more memory ran out of it"
    elif baseline.id in view.screened:
        outcome = Outcome.SCREENED
        evidence = "predicted not to fit, so it was not measured"
    else:
        return None
    return _unmeasured_baseline(
        baseline,
        job.memory_limit_bytes,
        outcome=outcome,
        evidence=evidence,
    )


def _unmeasured_baseline(
    baseline: Candidate,
    limit_bytes: int,
    *,
    outcome: Outcome,
    evidence: str,
) -> Trial:
    memory = Memory(
        peak_bytes=None,
        limit_bytes=limit_bytes,
        bound_by="nothing: it was not run",
    )
    measurement = Measurement(
        candidate_id=baseline.id,
        outcome=outcome,
        memory=memory,
        cost=Cost(total_seconds=0.0, load_seconds=0.0),
        failure=Failure(evidence=evidence),
    )
    return Trial(
        number=-1,
        purpose="baseline",
        candidate=baseline,
        measurement=measurement,
        verdict=judge(measurement),
    )


def _counts(view: TrialView, loads: int) -> Counts:
    out_of_memory = failed = confirmations = 0
    for trial in view.all:
        out_of_memory += trial.measurement.outcome.is_out_of_memory
        failed += trial.measurement.outcome in FAILURES
        confirmations += trial.purpose == "confirm"
    refused = [trial for trial in view.probes if trial.purpose == "refused"]
    false_refusals = [trial for trial in refused if trial.verdict.fits]
    counts = [len(tier.candidates) for tier in view.tiers]
    return Counts(
        candidates=sum(counts),
        screened=len(view.screened),
        implied=len(view.implied),
        probed=len(view.probes),
        out_of_memory=out_of_memory,
        failed=failed,
        loads=loads,
        confirmations=confirmations,
        refused_probed=len(refused),
        false_refusals=len(false_refusals),
    )


def relaxed_in(job: Job, chosen: Candidate) -> dict[str, KnobValue]:
    """Return the learning knobs that are not at their most preferred value; none in a search for
    speed alone.
    """
    if job.space.objective == "throughput":
        return {}
    relaxed = {}
    values = learning_values(job.space, chosen)
    for name, value in values.items():
        preferred = job.space[name].choices[0]
        if value != preferred:
            relaxed[name] = value
    return relaxed


def changes_between(
    job: Job,
    baseline: Candidate,
    chosen: Candidate,
) -> tuple[Change, ...]:
    """Return every knob in which the two differ, with the reason; learning knobs first."""
    changes = []
    for name in {**chosen.knobs, **baseline.knobs}:
        before = baseline.knobs.get(name)
        after = chosen.knobs.get(name)
        if before == after:
            continue
        knob = job.space[name]
        effect = knob.effect_under(chosen.settings)
        why = knob.says
        if effect == "learning":
            why = _why_learning_knob_changed(job.space, knob, after)
        changes.append(
            Change(
                name=name,
                baseline=before,
                recommended=after,
                effect=effect,
                why=why,
            )
        )
    return tuple(sorted(changes, key=lambda change: change.effect != "learning"))


def _why_learning_knob_changed(
    space: SearchSpace,
    knob: Knob,
    value: KnobValue,
) -> str:
    preferred = knob.choices[0]
    if space.objective == "throughput":
        return "searched for speed alone, as this space declares"
    if value == preferred:
        return "the space's preferred value, and it fits"
    return f"relaxed from {preferred}, with which nothing fitted"


def choose(view: TrialView, *, finished: bool) -> tuple[Trial | None, Advantage | None]:
    """Return the recommended trial and its speed compared with the baseline's, if one was
    measured at the same learning knobs. In a search that is not `finished` the best so far need
    not be confirmed.
    """
    # 1. Nothing fits, or nothing to compare with.
    fastest = view.best()
    baseline = view.fitting_baseline()
    if fastest is None:
        return None, None
    if baseline is None:
        return _simplest(fastest, view), None
    if baseline.candidate == fastest.candidate:
        return fastest, None
    ratio = compare(fastest, baseline, view)
    if ratio is None:
        return fastest, None

    # 2. The baseline stays unless a faster candidate is measurably so, and confirmed.
    if ratio.low <= 1.0:
        return baseline, _advantage(fastest, ratio, "within the noise")
    if finished and not view.is_confirmed(fastest.candidate):
        return baseline, _advantage(fastest, ratio, "not confirmed")

    # 3. The simplest of the fastest.
    winner = _simplest(fastest, view, baseline)
    winner_ratio = compare(winner, baseline, view) or ratio
    return winner, _advantage(winner, winner_ratio, "measurably faster")


def _advantage(
    trial: Trial,
    ratio: SpeedRatio,
    why: AdvantageKind,
) -> Advantage:
    return Advantage(
        candidate_id=trial.candidate.id,
        why=why,
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
    )


def _simplest(
    fastest: Trial,
    view: TrialView,
    baseline: Trial | None = None,
) -> Trial:
    """Return the simplest confirmed candidate that is as fast as the fastest, and measurably
    faster than the baseline.
    """
    choices = [fastest]
    for trial in as_fast_as(fastest, view):
        if not view.is_confirmed(trial.candidate):
            continue
        ratio = None if baseline is None else compare(trial, baseline, view)
        if ratio is None or ratio.low > 1.0:
            choices.append(trial)
    return min(choices, key=lambda trial: complexity(trial.candidate, view.baseline))

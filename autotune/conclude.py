"""From everything measured to the answer: a pure function, so that a recorded study can be concluded again."""

from __future__ import annotations

from autotune.candidate import Candidate, KnobValue
from autotune.measurement import Cost, Failure, Measurement, Memory, Outcome
from autotune.question import Question
from autotune.recommendation import Change, Counts, Proven, Recommendation, Trial
from autotune.study.preference import Tier, learning_values
from autotune.study.view import View, speed_of
from autotune.verdict import judge

RUNNER_UPS = 4


def conclude(seen: View, question: Question, *, proven: Proven | None, loads: int, elapsed_seconds: float) -> Recommendation:
    """The winner with its evidence; `proven` is None where the search was interrupted."""
    winner, tier = seen.best(), seen.tier_of_choice()
    baseline = next((trial for trial in seen.probes if trial.purpose == "baseline" or trial.candidate == seen.baseline), None)
    certificate = seen.confirmations.get(winner.candidate.id) if winner else None
    return Recommendation(
        winner=winner,
        certificate=certificate,
        baseline=_baseline(seen, baseline, question),
        learning=dict(tier.learning) if tier else {},
        runner_ups=_runner_ups(seen, winner, tier),
        trade_offs=_trade_offs(seen, tier),
        changes=_changes(question, winner, seen.baseline),
        relaxed=_relaxed(question, winner),
        refuted=tuple(trial for trial in seen.confirmations.values() if not trial.verdict.fits),
        counts=_counts(seen, loads),
        proven=_proven(seen, winner, proven),
        interrupted=proven is None,
        elapsed_seconds=elapsed_seconds,
        probe_seconds=sum(trial.measurement.cost.total_seconds for trial in seen.all) * question.job.hardware.count,
        trials=seen.all,
    )


def _baseline(seen: View, baseline: Trial | None, question: Question) -> Trial | None:
    """The baseline as measured last: where it was among the finalists, its longer probe is the fairer comparison."""
    if baseline is None:
        return None if seen.baseline is None else _settled(seen, seen.baseline, question)
    return seen.confirmations.get(baseline.candidate.id, baseline)


def _settled(seen: View, baseline: Candidate, question: Question) -> Trial | None:
    """A baseline that was not measured, because it was known not to fit: its outcome says so, and it has no figures."""
    if baseline.id in seen.implied:
        outcome, evidence = Outcome.IMPLIED, "something that needs no more than this ran out of memory"
    elif baseline.id in seen.screened:
        outcome, evidence = Outcome.SCREENED, "predicted not to fit, so it was not measured"
    else:
        return None
    unmeasured = Measurement(
        candidate_id=baseline.id,
        outcome=outcome,
        memory=Memory(peak_bytes=None, limit_bytes=question.memory_limit_bytes, bound_by="nothing: it was not run"),
        cost=Cost(total_seconds=0.0, load_seconds=0.0),
        failure=Failure(evidence=evidence),
    )
    return Trial(number=-1, purpose="baseline", candidate=baseline, measurement=unmeasured, verdict=judge(unmeasured))


def _proven(seen: View, winner: Trial | None, proven: Proven | None) -> Proven:
    if winner is None and proven != "no better candidate possible":
        return "not proven infeasible"
    return proven or "budget spent"


def _counts(seen: View, loads: int) -> Counts:
    outcomes = [trial.measurement.outcome for trial in seen.all]
    return Counts(
        candidates=sum(len(tier.candidates) for tier in seen.tiers),
        screened=len(seen.screened),
        implied=len(seen.implied),
        probed=len(seen.probes),
        out_of_memory=sum(outcome.is_out_of_memory for outcome in outcomes),
        failed=sum(outcome in ("crash", "timeout", "illegal") for outcome in outcomes),
        loads=loads,
        confirmations=sum(trial.purpose == "confirm" for trial in seen.all),
        refused_probed=sum(trial.purpose == "refused" for trial in seen.probes),
        false_refusals=sum(trial.purpose == "refused" and trial.verdict.fits for trial in seen.probes),
    )


def _runner_ups(seen: View, winner: Trial | None, tier: Tier | None) -> tuple[Trial, ...]:
    if winner is None or tier is None:
        return ()
    others = [seen.confirmations.get(trial.candidate.id, trial) for trial in seen.contenders(tier) if trial is not winner]
    return tuple(sorted(others, key=speed_of, reverse=True)[:RUNNER_UPS])


def _trade_offs(seen: View, tier: Tier | None) -> tuple[Trial, ...]:
    """The best of every other tier in which something was seen to fit."""
    return tuple(contenders[0] for other in seen.tiers if other is not tier and (contenders := seen.contenders(other)))


def _relaxed(question: Question, winner: Trial | None) -> dict[str, KnobValue]:
    return {} if winner is None else relaxed_in(question, winner.candidate)


def relaxed_in(question: Question, chosen: Candidate) -> dict[str, KnobValue]:
    """Learning knobs that are not at their most preferred value. Speed alone knows no preference."""
    if question.space.objective == "throughput":
        return {}
    values = learning_values(question.space, chosen)
    return {name: value for name, value in values.items() if value != question.space[name].choices[0]}


def _changes(question: Question, winner: Trial | None, baseline: Candidate | None) -> tuple[Change, ...]:
    return () if winner is None or baseline is None else changes_between(question, baseline, winner.candidate)


def changes_between(question: Question, baseline: Candidate, chosen: Candidate) -> tuple[Change, ...]:
    """Every knob in which the two differ, and why; what is learned differently comes first."""
    before, after = baseline.knobs, chosen.knobs
    names = [name for name in {**after, **before} if before.get(name) != after.get(name)]
    changes = [_change(question, name, baseline, chosen) for name in names]
    return tuple(sorted(changes, key=lambda change: change.effect != "learning"))


def _change(question: Question, name: str, before: Candidate, after: Candidate) -> Change:
    knob = question.space[name]
    effect = knob.effect_under(after.settings)
    return Change(
        name=name,
        baseline=before.knobs.get(name),
        recommended=after.knobs.get(name),
        effect=effect,
        why=_why(question, name, after) if effect == "learning" else knob.says,
    )


def _why(question: Question, name: str, after: Candidate) -> str:
    knob = question.space[name]
    if question.space.objective == "throughput":
        return "searched for speed alone, as this space asks"
    if after.knobs.get(name) == knob.choices[0]:
        return "the value that the space prefers, and it fits"
    return f"gave way from {knob.choices[0]}, with which nothing fitted"

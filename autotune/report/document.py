"""The answer as one JSON document: what `autotune run --json` prints and recommendation.json holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.candidate import Candidate
from autotune.measurement import PHASES, Measurement, Outcome, Speed
from autotune.question import Question
from autotune.recommendation import Change, Counts, Recommendation, Trial
from autotune.secrets import without_password

SCHEMA = 1
"""Goes up when a field is renamed or dropped; fields are added freely."""


def document(question: Question, answer: Recommendation, files: Sequence[str], *, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """The whole answer. Figures are as measured; what was not measured is null."""
    return {
        "schema": SCHEMA,
        "status": "ok" if answer.winner else "nothing_fits",
        "basis": "measured",
        "recommendation": _recommended(question, answer, files),
        "baseline": _baseline(answer.baseline),
        "changes": [change_row(change) for change in answer.changes],
        "runner_ups": [_trial(trial) for trial in answer.runner_ups],
        "trade_offs": [_trade_off(answer, trial) for trial in answer.trade_offs],
        "nearest_miss": _nearest(answer),
        "refuted": [_trial(trial) for trial in answer.refuted],
        "counts": _counts(answer.counts),
        "trials": [{"purpose": trial.purpose, **_trial(trial)} for trial in answer.trials],
        "proven": answer.proven,
        "question": question_row(question),
        "study": {"storage": without_password(question.storage), "name": question.study_name},
        "out": str(question.out),
        "elapsed_seconds": round(answer.elapsed_seconds, 2),
        "gpu_seconds": round(answer.probe_seconds, 2) if question.job.hardware.kind == "cuda" else None,
        "probe_seconds": round(answer.probe_seconds, 2),
        "warnings": list(warnings),
        "versions": _versions(answer),
    }


def learning_difference(question: Question, one: Candidate, other: Candidate) -> dict[str, Any]:
    """Learning knobs in which `one` differs from `other`, with the values of `one`."""
    names = [knob.name for knob in question.space.learning_knobs(other.settings)]
    return {name: one.knobs.get(name) for name in names if one.knobs.get(name) != other.knobs.get(name)}


def failed_without_memory(answer: Recommendation) -> bool:
    """Whether nothing ended well and memory was never the reason: that is a failure, and not an answer about what fits."""
    measured = [trial.measurement for trial in answer.trials]
    lacked = any(one.outcome.is_out_of_memory or one.outcome is Outcome.OK for one in measured)
    return answer.winner is None and bool(measured) and not lacked


def nearest_miss(answer: Recommendation) -> Trial | None:
    """Of what did not fit, the one that came closest to the limit; None where something fits or no peak is known."""
    missed = [trial for trial in answer.trials if _lacked_memory(trial)]
    return None if answer.winner or not missed else max(missed, key=_came_far)


def _lacked_memory(trial: Trial) -> bool:
    outcome, peak = trial.measurement.outcome, trial.measurement.memory.peak_bytes
    return peak is not None and not trial.verdict.fits and (outcome.is_out_of_memory or outcome is Outcome.OK)


def _came_far(trial: Trial) -> tuple[int, int, int]:
    """One that got through more of a step came closer than one that died while loading; then the lower peak did."""
    phase = trial.measurement.failure.phase if trial.measurement.failure else None
    reached = len(PHASES) if phase is None else PHASES.index(phase)
    return trial.measurement.optimizer_steps, reached, -(trial.measurement.memory.peak_bytes or 0)


def _recommended(question: Question, answer: Recommendation, files: Sequence[str]) -> dict[str, Any] | None:
    if answer.winner is None:
        return None
    proof = answer.certificate or answer.winner
    memory = proof.measurement.memory
    return {
        "knobs": dict(answer.winner.candidate.knobs),
        "settings": dict(answer.winner.candidate.settings),
        "changed_learning_knobs": {change.name: change.recommended for change in answer.changes if change.effect == "learning"},
        "relaxed": dict(answer.relaxed),
        "tokens_per_second": _speeds(proof.measurement),
        "spread": _spreads(proof.measurement),
        "peak_memory_bytes": memory.peak_bytes,
        "limit_bytes": question.memory_limit_bytes,
        "phase_peak_bytes": dict(memory.phase_peak_bytes),
        "certificate": _certificate(answer.certificate),
        "files": list(files),
    }


def _certificate(proof: Trial | None) -> dict[str, Any] | None:
    """How the winner was confirmed; null when the budget ran out before it could be."""
    if proof is None:
        return None
    measured = proof.measurement
    return {
        "trial": proof.number,
        "outcome": str(measured.outcome),
        "why": proof.verdict.why,
        "margin_bytes": proof.verdict.margin_bytes,
        "bound_by": measured.memory.bound_by,
        "optimizer_steps": measured.optimizer_steps,
        "timed_cycles": len(measured.worst.cycle_seconds) if measured.worst else 0,
        "longest_completion_tokens": measured.worst.completion_tokens if measured.worst else None,
        "torch_allocated_bytes": measured.memory.torch_allocated_bytes,
        "torch_reserved_bytes": measured.memory.torch_reserved_bytes,
        "allocation_retries": measured.memory.allocation_retries,
        "phase_seconds": dict(measured.worst.phase_seconds) if measured.worst else {},
        "user_reward_seconds": measured.worst.user_reward_seconds if measured.worst else None,
        "effective": dict(measured.effective),
    }


def _baseline(trial: Trial | None) -> dict[str, Any] | None:
    if trial is None:
        return None
    speed = trial.measurement.ranking_speed
    return {
        "knobs": dict(trial.candidate.knobs),
        "outcome": str(trial.measurement.outcome),
        "why": trial.verdict.why,
        "tokens_per_second": round(speed.tokens_per_second, 2) if speed else None,
        "peak_memory_bytes": trial.measurement.memory.peak_bytes,
    }


def _trial(trial: Trial) -> dict[str, Any]:
    failure = trial.measurement.failure
    return {
        "trial": trial.number,
        "knobs": dict(trial.candidate.knobs),
        "outcome": str(trial.measurement.outcome),
        "fits": trial.verdict.fits,
        "why": trial.verdict.why,
        "tokens_per_second": _speeds(trial.measurement),
        "peak_memory_bytes": trial.measurement.memory.peak_bytes,
        "phase": failure.phase if failure else None,
        "cause": failure.cause if failure else None,
    }


def _trade_off(answer: Recommendation, trial: Trial) -> dict[str, Any]:
    winner = answer.winner.candidate.knobs if answer.winner else {}
    speed = trial.measurement.ranking_speed
    return {
        "change": {name: value for name, value in trial.candidate.knobs.items() if winner.get(name) != value},
        "tokens_per_second": round(speed.tokens_per_second, 2) if speed else None,
        "peak_memory_bytes": trial.measurement.memory.peak_bytes,
        "outcome": str(trial.measurement.outcome),
    }


def _nearest(answer: Recommendation) -> dict[str, Any] | None:
    trial = nearest_miss(answer)
    return None if trial is None else {**_trial(trial), "over_bytes": _over(trial)}


def _over(trial: Trial) -> int | None:
    margin = trial.verdict.margin_bytes
    return -margin if margin is not None and margin < 0 else None


def change_row(change: Change) -> dict[str, Any]:
    return {
        "name": change.name,
        "baseline": change.baseline,
        "recommended": change.recommended,
        "effect": change.effect,
        "why": change.why,
    }


def _speeds(measurement: Measurement) -> dict[str, float | None]:
    return {"worst": _rate(measurement.worst), "typical": _rate(measurement.typical)}


def _spreads(measurement: Measurement) -> dict[str, float | None]:
    return {
        "worst": measurement.worst.spread if measurement.worst else None,
        "typical": measurement.typical.spread if measurement.typical else None,
    }


def _rate(speed: Speed | None) -> float | None:
    return round(speed.tokens_per_second, 2) if speed else None


def _counts(counts: Counts) -> dict[str, int]:
    return {
        "candidates": counts.candidates,
        "screened": counts.screened,
        "implied": counts.implied,
        "probed": counts.probed,
        "out_of_memory": counts.out_of_memory,
        "failed": counts.failed,
        "loads": counts.loads,
        "confirmations": counts.confirmations,
        "refused_probed": counts.refused_probed,
        "false_refusals": counts.false_refusals,
    }


def question_row(question: Question) -> Mapping[str, Any]:
    workload, hardware = question.job.workload, question.job.hardware
    return {
        "model": workload.model.name,
        "model_from": workload.model.origin,
        "method": workload.method,
        "framework": workload.framework,
        "tuning": workload.tuning,
        "weights": workload.weights,
        "hardware": str(hardware),
        "memory_limit_bytes": question.memory_limit_bytes,
        "space": question.space.name,
        "budget_seconds": question.budget_seconds,
        "typical_completion_length": workload.typical_completion_length,
    }


def _versions(answer: Recommendation) -> dict[str, str]:
    for trial in (answer.certificate, answer.winner, answer.baseline, *answer.trials):
        if trial is not None and trial.measurement.versions:
            return dict(trial.measurement.versions)
    return {}

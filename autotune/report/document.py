"""The answer as one JSON document: what `autotune run --json` prints and recommendation.json holds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from autotune.candidate import Candidate
from autotune.disturbance import Disturbance, in_words
from autotune.measurement import PHASES, Measurement, Outcome
from autotune.question import Question
from autotune.recommendation import Change, Counts, Recommendation, Trial
from autotune.report.certificate import certificate_row
from autotune.report.own_script import script_section
from autotune.report.rows import baseline_row, rate, speeds, trial_row
from autotune.report.rows_of_data import data_row
from autotune.secrets import without_password
from autotune.soak import Soak

SCHEMA = 1
"""Goes up when a field is renamed or dropped; fields are added freely."""


def document(
    question: Question,
    answer: Recommendation,
    files: Sequence[str],
    *,
    warnings: Sequence[str] = (),
    commands: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The whole answer. Figures are as measured; what was not measured is null."""
    return {
        "schema": SCHEMA,
        "status": _status(answer),
        "basis": "measured",
        "recommendation": _recommended(question, answer, files),
        "baseline": None if answer.baseline is None else baseline_row(answer.baseline),
        "changes": [change_row(change) for change in answer.changes],
        "runner_ups": [trial_row(trial) for trial in answer.runner_ups],
        "trade_offs": [_trade_off(answer, trial) for trial in answer.trade_offs],
        "nearest_miss": _nearest(answer),
        "refuted": [trial_row(trial) for trial in answer.refuted],
        "counts": _counts(answer.counts),
        "script": script_section(question, answer.winner.candidate if answer.winner else None),
        "trials": [{"purpose": trial.purpose, **trial_row(trial)} for trial in answer.trials],
        "proven": answer.proven,
        "rows_left_out": answer.rows_left_out,
        "from_record": _from_record(answer),
        "learning": dict(answer.learning),
        "commands": dict(commands),
        "resume_with": commands.get("go on") if answer.interrupted else None,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "question": question_row(question),
        "study": {"storage": without_password(question.storage), "name": question.study_name},
        "out": str(question.out),
        "soaks": [soak_row(one) for one in answer.soaks],
        "disturbance": _disturbance(answer.disturbance),
        "elapsed_seconds": round(answer.elapsed_seconds, 2),
        "gpu_seconds": round(answer.probe_seconds, 2) if question.job.hardware.kind == "cuda" else None,
        "probe_seconds": round(answer.probe_seconds, 2),
        "seconds_per_candidate": _seconds_per_candidate(answer),
        "warnings": list(warnings),
        "versions": _versions(answer),
    }


def _status(answer: Recommendation) -> str:
    if answer.interrupted:
        return "interrupted"
    if failed_without_memory(answer):
        return "failed"
    if found_nothing_out(answer):
        return "undecided"
    return "ok" if answer.winner else "nothing_fits"


def learning_difference(question: Question, one: Candidate, other: Candidate) -> dict[str, Any]:
    """Learning knobs in which `one` differs from `other`, with the values of `one`."""
    names = [knob.name for knob in question.space.learning_knobs(other.settings)]
    return {name: one.knobs.get(name) for name in names if one.knobs.get(name) != other.knobs.get(name)}


def failed_without_memory(answer: Recommendation) -> bool:
    """Whether nothing ended well and memory was never the reason: that is a failure, and not an answer about what fits."""
    measured = _ended(answer)
    lacked = any(one.outcome.is_out_of_memory or one.outcome is Outcome.OK for one in measured)
    return answer.winner is None and bool(measured) and not lacked


def found_nothing_out(answer: Recommendation) -> bool:
    """Whether the budget, or somebody, ended every probe before it had an answer."""
    return answer.winner is None and not _ended(answer)


def _ended(answer: Recommendation) -> list[Measurement]:
    """What probes found out by themselves; one that was ended from outside says nothing about its candidate."""
    return [trial.measurement for trial in answer.trials if trial.measurement.outcome is not Outcome.INTERRUPTED]


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


def _from_record(answer: Recommendation) -> dict[str, Any] | None:
    """When, where and by which versions it was measured, where that was not now."""
    source = answer.from_record
    if source is None:
        return None
    return {
        "when": source.when,
        "where": source.where,
        "versions": dict(source.versions),
        "elapsed_seconds": round(source.elapsed_seconds, 2),
    }


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
        "tokens_per_second": speeds(proof.measurement),
        "spread": _spreads(proof.measurement),
        "peak_memory_bytes": memory.peak_bytes,
        "limit_bytes": question.memory_limit_bytes,
        "phase_peak_bytes": dict(memory.phase_peak_bytes),
        "certificate": certificate_row(question, answer.certificate),
        "files": list(files),
    }


def _disturbance(found: Disturbance | None) -> dict[str, Any] | None:
    """What probes at the same time did to each other; null where they ran one after another."""
    if found is None:
        return None
    return {
        "beside": found.beside,
        "tokens_per_second_beside": round(found.tokens_per_second_beside, 2),
        "tokens_per_second_alone": round(found.tokens_per_second_alone, 2),
        "slower_share": round(found.slower_share, 4),
        "uncertainty": None if found.uncertainty is None else round(found.uncertainty, 4),
        "by_phase": {phase: round(share, 4) for phase, share in found.by_phase.items()},
        "candidate_id": found.candidate_id,
        "says": in_words(found),
    }


def soak_row(soak: Soak) -> dict[str, Any]:
    """A long run: what memory did over it."""
    growth = soak.growth
    return {
        "verdict": soak.verdict,
        "why": soak.why,
        "seconds": round(soak.seconds, 2),
        "cycles": [[one.steps, one.seconds, one.peak_bytes, one.held_bytes] for one in soak.cycles],
        "cycle_columns": ["optimizer_steps", "seconds", "peak_bytes", "held_bytes"],
        "optimizer_steps": soak.optimizer_steps,
        "growth_bytes_per_step": None
        if growth is None
        else {"value": growth.bytes_per_step, "low": growth.low, "high": growth.high},
        "projected_steps": soak.projected_steps,
        "peak_bytes": soak.peak_bytes,
        "limit_bytes": soak.limit_bytes,
    }


def _seconds_per_candidate(answer: Recommendation) -> dict[str, float | None]:
    """What a measured candidate cost: one that had to load, and a further one on the same rig; the medians."""
    costs = [trial.measurement.cost for trial in answer.trials if trial.purpose != "confirm"]
    first = [cost.total_seconds for cost in costs if cost.load_seconds]
    further = [cost.total_seconds for cost in costs if not cost.load_seconds]
    return {"loading": _median(first), "further": _median(further)}


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _trade_off(answer: Recommendation, trial: Trial) -> dict[str, Any]:
    winner = answer.winner.candidate.knobs if answer.winner else {}
    return {
        "change": {name: value for name, value in trial.candidate.knobs.items() if winner.get(name) != value},
        "tokens_per_second": rate(trial.measurement.ranking_speed),
        "peak_memory_bytes": trial.measurement.memory.peak_bytes,
        "outcome": str(trial.measurement.outcome),
    }


def _nearest(answer: Recommendation) -> dict[str, Any] | None:
    trial = nearest_miss(answer)
    return None if trial is None else {**trial_row(trial), "over_bytes": _over(trial)}


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


def _spreads(measurement: Measurement) -> dict[str, float | None]:
    return {
        "worst": measurement.worst.spread if measurement.worst else None,
        "typical": measurement.typical.spread if measurement.typical else None,
    }


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
        "dataset": data_row(question.data),
    }


def _versions(answer: Recommendation) -> dict[str, str]:
    for trial in (answer.certificate, answer.winner, answer.baseline, *answer.trials):
        if trial is not None and trial.measurement.versions:
            return dict(trial.measurement.versions)
    return {}

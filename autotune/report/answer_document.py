"""JSON documents: recommendation.json of `autotune run`, measured or predicted, and `predict
--json`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from autotune.core.answer import (
    Forecast,
    PredictedCandidate,
    Recommendation,
    Trial,
    WayToFit,
    plain,
    without_result,
)
from autotune.core.job import Job
from autotune.core.measurement import PHASES, Measurement, Outcome, Speed
from autotune.core.prediction import Prediction
from autotune.core.secrets import without_password
from autotune.core.space import Candidate, setting_text
from autotune.estimate.unknown_facts import FactVariant
from autotune.frameworks.shares_in_files import for_files
from autotune.frameworks.trl.script_files import PATCH_NAME, advice_for
from autotune.report.busy_machine import busy_machine_text
from autotune.report.certificate import certificate_row
from autotune.report.document_rows import (
    disturbance_row,
    job_row,
    middle,
    predicted_row,
    prediction_row,
    rate,
    soak_row,
    speeds,
    trial_row,
    way_row,
)
from autotune.report.document_types import SCHEMA


def relative_spread(speed: Speed | None, answer: Recommendation) -> float | None:
    """Return the relative half width of a speed's 95 % interval, the spread between runs included;
    without it (answers of earlier versions) that of the cycles."""
    if speed is None or _is_predicted(answer):
        return None
    if answer.run_spread is None:
        return speed.spread
    return answer.run_spread.half_width(speed)


def describe_advantage(answer: Recommendation) -> str | None:
    """Return one sentence about the recommendation's speed and the baseline's; None without a
    comparison.
    """
    advantage = answer.advantage
    if advantage is None or _is_predicted(answer):
        return None
    size = (
        f"{advantage.ratio:.2f} times the baseline's speed (95 % confidence: at least"
        f" {advantage.low:.2f} times)"
    )
    if advantage.why == "measurably faster":
        return f"Measurably faster: {size}."
    if advantage.why == "within the noise":
        return (
            f"No measurable difference: the fastest other candidate had {size}. The baseline is"
            " kept."
        )
    return (
        f"The baseline is kept: the fastest other candidate had {size}, but was not confirmed. Go"
        " on with --resume."
    )


def _is_predicted(answer: Recommendation) -> bool:
    """Return True if the speeds are predictions: on emulated GPUs there is no spread between
    runs.
    """
    return any(trial.measurement.emulated for trial in answer.trials)


def document(
    job: Job,
    answer: Recommendation | Forecast,
    files: Sequence[str],
    *,
    warnings: Sequence[str] = (),
    commands: Mapping[str, str] = MappingProxyType({}),
    confirm_with: str = "",
    file: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return recommendation.json. `confirm_with` belongs to an emulated or predicted answer."""
    if isinstance(answer, Recommendation):
        fields = _measured_fields(job, answer, commands, confirm_with)
    else:
        fields = _predicted_fields(answer, confirm_with)
        fields["commands"] = dict(commands)
    winner = answer.winner
    figures = fields.pop("winner")
    learned = {}
    for change in answer.changes:
        if change.effect == "learning":
            learned[change.name] = change.recommended
    return {
        "schema": SCHEMA,
        "status": fields.pop("status"),
        "basis": fields.pop("basis"),
        "recommendation": (
            winner
            and {
                "knobs": dict(winner.candidate.knobs),
                "settings": dict(winner.candidate.settings),
                "changed_learning_knobs": learned,
                "relaxed": dict(answer.relaxed),
                **figures,
                "limit_bytes": job.memory_limit_bytes,
                "files": list(files),
            }
        ),
        "baseline": fields.pop("baseline"),
        "changes": list(map(plain, answer.changes)),
        "runner_ups": fields.pop("runner_ups"),
        "ways_to_fit": list(map(way_row, answer.ways_to_fit)),
        **fields,
        "file": file,
        "question": job_row(job),
        "out": str(job.out),
        "elapsed_seconds": round(answer.elapsed_seconds, 2),
        "warnings": list(warnings),
    }


def _measured_fields(
    job: Job,
    answer: Recommendation,
    commands: Mapping[str, str],
    confirm_with: str,
) -> dict[str, Any]:
    """Return the fields of a measured or emulated answer; `winner`: the figures of its
    recommendation.
    """
    baseline = answer.baseline
    miss = nearest_miss(answer)
    source = answer.from_record
    proof = answer.winner and (answer.certificate or answer.winner)
    sentence = describe_advantage(answer)
    return {
        "status": _status(answer),
        "basis": "emulated" if job.task.hardware.emulated else "measured",
        "winner": proof and _winner_fields(job, answer, proof),
        "baseline": (
            baseline
            and {
                **trial_row(baseline),
                "tokens_per_second": rate(baseline.measurement.ranking_speed),
            }
        ),
        "runner_ups": list(map(trial_row, answer.runner_ups)),
        "trade_offs": [_trade_off_row(answer, trial) for trial in answer.trade_offs],
        "nearest_miss": miss and {**trial_row(miss), "over_bytes": _over_bytes(miss)},
        "refuted": list(map(trial_row, answer.refuted)),
        "counts": plain(answer.counts),
        "script": _script_section(job, answer),
        "trials": [{"purpose": trial.purpose, **trial_row(trial)} for trial in answer.trials],
        "proven": answer.proven,
        "rows_left_out": answer.rows_left_out,
        "from_record": (
            source and {**plain(source), "elapsed_seconds": round(source.elapsed_seconds, 2)}
        ),
        "learning": dict(answer.learning),
        "commands": dict(commands),
        "confirm_with": confirm_with or None,
        "caveats": list(caveats_of(answer)),
        "busy_machine": busy_machine_text(answer),
        "resume_with": commands.get("go on") if answer.interrupted else None,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "study": {"storage": without_password(job.storage), "name": job.study_name},
        "soaks": list(map(soak_row, answer.soaks)),
        "disturbance": answer.disturbance and disturbance_row(answer.disturbance),
        "advantage": sentence and {**plain(answer.advantage), "says": sentence},
        "run_spread": plain(answer.run_spread),
        "gpu_seconds": round(answer.probe_seconds, 2) if job.task.hardware.kind == "cuda" else None,
        "probe_seconds": round(answer.probe_seconds, 2),
        "seconds_per_candidate": _seconds_per_candidate(answer),
        "versions": _versions(answer),
    }


def _status(answer: Recommendation) -> str:
    if answer.interrupted:
        return "interrupted"
    if failed_without_memory(answer):
        return "failed"
    if answer.winner is not None:
        return "ok"
    undecided = has_no_results(answer) or answer.proven == "not all measured"
    return "undecided" if undecided else "nothing_fits"


def _winner_fields(
    job: Job,
    answer: Recommendation,
    proof: Trial,
) -> dict[str, Any]:
    measurement = proof.measurement
    return {
        "basis": measurement.basis,
        "tokens_per_second": speeds(measurement),
        "spread": {
            "worst": relative_spread(measurement.worst, answer),
            "typical": relative_spread(measurement.typical, answer),
        },
        "peak_memory_bytes": measurement.memory.peak_bytes,
        "phase_peak_bytes": dict(measurement.memory.phase_peak_bytes),
        "certificate": certificate_row(job, answer.certificate),
    }


def _trade_off_row(answer: Recommendation, trial: Trial) -> dict[str, Any]:
    return {
        "change": differing_knobs(answer.winner, trial),
        "basis": trial.measurement.basis,
        "tokens_per_second": rate(trial.measurement.ranking_speed),
        "peak_memory_bytes": trial.measurement.memory.peak_bytes,
        "outcome": str(trial.measurement.outcome),
    }


def _over_bytes(miss: Trial) -> int | None:
    """Return the bytes above the limit; None where they are not known."""
    margin = miss.verdict.margin_bytes
    if margin is None or margin >= 0:
        return None
    return -margin


def _versions(answer: Recommendation) -> dict[str, str]:
    """Return the versions that the first of these trials reported."""
    for trial in (answer.certificate, answer.winner, answer.baseline, *answer.trials):
        if trial is not None and trial.measurement.versions:
            return dict(trial.measurement.versions)
    return {}


def _predicted_fields(answer: Forecast, confirm_with: str) -> dict[str, Any]:
    """Return the fields of a predicted answer; `winner`: the figures of its recommendation."""
    unmeasured = dict.fromkeys(("implied", "probed", "out_of_memory", "failed", "loads"), 0)
    winner = answer.winner
    trade_offs = []
    for candidate in answer.trade_offs:
        trade_offs.append(
            {"change": differing_knobs(winner, candidate), **predicted_row(candidate)}
        )
    status = "undecided"
    proven = "not proven infeasible"
    versions: dict[str, str] = {}
    if winner is not None:
        status = "ok"
        proven = "budget spent"
        versions.update(winner.prediction.versions)
    elif answer.screened == answer.candidates:
        status = "nothing_fits"
    return {
        "status": status,
        "basis": "predicted",
        "winner": (
            winner
            and {
                "basis": "predicted",
                "tokens_per_second": {
                    "worst": middle(winner.prediction.tokens_per_second),
                    "typical": middle(winner.prediction.tokens_per_second_at_lengths),
                },
                "peak_memory_bytes": middle(winner.prediction.peak_memory_bytes),
                "prediction": prediction_row(winner.prediction),
                "certificate": None,
            }
        ),
        "baseline": answer.baseline and predicted_row(answer.baseline),
        "runner_ups": list(map(predicted_row, answer.runner_ups)),
        "trade_offs": trade_offs,
        "undecided": answer.undecided and predicted_row(answer.undecided),
        "nearest_miss": answer.nearest_miss and predicted_row(answer.nearest_miss),
        "counts": {
            "candidates": answer.candidates,
            "predicted": answer.predicted,
            "screened": answer.screened,
            **unmeasured,
        },
        "proven": proven,
        "stopped_by": "budget" if answer.ended_by_budget else None,
        "confirm_with": confirm_with,
        "study": None,
        "gpu_seconds": None,
        "versions": versions,
    }


def prediction_document(
    job: Job,
    candidate: Candidate,
    prediction: Prediction,
    ways: Sequence[WayToFit],
    *,
    origins: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    unknown: Sequence[FactVariant] = (),
    refusal: str | None = None,
) -> dict[str, Any]:
    """Return `predict --json`: one candidate, its ways to fit, and the variants of unknown
    facts. `refusal`: a guarded run in which it ran out of memory.
    """
    variants = []
    for variant in unknown:
        variants.append({"facts": dict(variant.facts), **prediction_row(variant.prediction)})
    return {
        "schema": SCHEMA,
        **prediction_row(prediction),
        "settings": dict(candidate.settings),
        "origins": dict(origins),
        "ways_to_fit": list(map(way_row, ways)),
        "unknown": variants,
        "ran_out_of_memory": refusal,
        "question": job_row(job),
    }


def differing_knobs(
    winner: Trial | PredictedCandidate | None, alternative: Trial | PredictedCandidate
) -> dict[str, Any]:
    """Return the other candidate's values of the knobs in which it differs from the winner."""
    chosen: Mapping[str, object] = winner.candidate.knobs if winner else {}
    differing = {}
    for name, value in alternative.candidate.knobs.items():
        if chosen.get(name) != value:
            differing[name] = value
    return differing


def caveats_of(answer: Recommendation) -> tuple[str, ...]:
    """Return the restrictions of the winner's figures, or without a winner of all figures, and
    the candidates without any.
    """
    proof = answer.certificate or answer.winner
    trials = answer.trials if proof is None else (proof,)
    caveats: list[str] = []
    for trial in trials:
        caveats += trial.measurement.caveats
    names = []
    for candidate in without_result(answer.trials):
        names.append(_named(differing_knobs(answer.winner, candidate)))
    if names:
        listed = "; ".join(names[:3])
        if len(names) > 3:
            listed += f" and {len(names) - 3} more"
        caveats.append(
            f"Every probe was ended from outside, so there is no result: {listed}. --fresh measures"
            " again."
        )
    return tuple(dict.fromkeys(caveats))


def _named(knobs: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={setting_text(value)}" for name, value in knobs.items())


def failed_without_memory(answer: Recommendation) -> bool:
    """Return True if no probe or confirmation lacked memory, and others failed: the answer is a
    failure, not "nothing fits".
    """
    return (
        answer.winner is None
        and bool(_results(answer))
        and not any(_lacked_memory(trial) for trial in answer.trials)
    )


def has_no_results(answer: Recommendation) -> bool:
    """Return True if every probe was ended by the budget or by an interruption."""
    return answer.winner is None and not _results(answer)


def _results(answer: Recommendation) -> list[Measurement]:
    measurements = []
    for trial in answer.trials:
        if trial.measurement.outcome is not Outcome.INTERRUPTED:
            measurements.append(trial.measurement)
    return measurements


def _lacked_memory(trial: Trial) -> bool:
    outcome = trial.measurement.outcome
    return outcome.is_out_of_memory or (outcome is Outcome.OK and not trial.verdict.fits)


def nearest_miss(answer: Recommendation) -> Trial | None:
    """Return the trial closest to fitting; None if one fits or no peak is known."""
    if answer.winner:
        return None
    missed = []
    for trial in answer.trials:
        has_peak = trial.measurement.memory.peak_bytes is not None
        if has_peak and _lacked_memory(trial) and not trial.verdict.fits:
            missed.append(trial)
    return max(missed, key=_progress, default=None)


def _progress(trial: Trial) -> tuple[int, int, int]:
    """Sort key: optimizer steps, then the phase reached, then the lower peak."""
    measured = trial.measurement
    reached = len(PHASES)
    if measured.failure is not None and measured.failure.phase is not None:
        reached = PHASES.index(measured.failure.phase)
    return measured.optimizer_steps, reached, -(measured.memory.peak_bytes or 0)


def _seconds_per_candidate(answer: Recommendation) -> dict[str, float | None]:
    """Return the median seconds of a probe with a load, and of one on a live load."""
    loading = []
    further = []
    for trial in answer.trials:
        cost = trial.measurement.cost
        if trial.purpose == "confirm":
            continue
        if cost.load_seconds:
            loading.append(cost.total_seconds)
        else:
            further.append(cost.total_seconds)
    return {"loading": _median(loading), "further": _median(further)}


def _median(seconds: Sequence[float]) -> float | None:
    if not seconds:
        return None
    return round(statistics.median(seconds), 3)


def _script_section(job: Job, answer: Recommendation) -> dict[str, Any] | None:
    """Return the document's section about the script; None without one. A patch needs a
    confirmed winner.
    """
    script = job.task.workload.script
    if script is None:
        return None
    section: dict[str, Any] = {
        "path": script.path,
        "arguments": list(script.arguments),
        "rewards": script.rewards,
        "reward_functions": list(script.look.rewards),
        "trainer": script.look.trainer,
    }
    if answer.winner is None or answer.certificate is None:
        return {**section, "changes": None}
    advice = advice_for(*for_files(answer.winner.candidate, job), script)
    by_hand = {}
    for name, why in advice.by_hand.items():
        by_hand[name] = {"value": advice.changes[name], "why": why}
    return {
        **section,
        "changes": dict(advice.changes),
        "keyword_arguments": advice.keyword_arguments,
        "patch": str(job.out / PATCH_NAME) if advice.patch else None,
        "patched_file": advice.patched_file,
        "by_hand": by_hand,
        "in_objects": dict(advice.in_objects),
        "flags": list(advice.flags) if script.takes_flags else None,
    }

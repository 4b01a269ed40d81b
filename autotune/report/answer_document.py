"""JSON documents: recommendation.json of `autotune run`, measured or predicted, and `predict
--json`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from autotune.core.answer import (
    Forecast,
    PredictedCandidate,
    Recommendation,
    Trial,
    WayToFit,
)
from autotune.core.job import Job
from autotune.core.measurement import Measurement
from autotune.core.plain_data import plain
from autotune.core.prediction import Prediction
from autotune.core.secrets import without_password
from autotune.core.space import Candidate
from autotune.estimate.unknown_facts import FactVariant
from autotune.frameworks.shares_in_files import for_files
from autotune.frameworks.trl.script_files import PATCH_NAME, advice_for
from autotune.report.answer_facts import (
    caveats_of,
    describe_advantage,
    differing_knobs,
    failed_without_memory,
    has_no_results,
    nearest_miss,
    relative_spread,
)
from autotune.report.busy_machine import busy_machine_text
from autotune.report.certificate import certificate_row
from autotune.report.document_rows import (
    Row,
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


def document(
    job: Job,
    answer: Recommendation | Forecast,
    files: Sequence[str],
    *,
    warnings: Sequence[str] = (),
    commands: Mapping[str, str] = MappingProxyType({}),
    confirm_with: str = "",
    file: Mapping[str, Any] | None = None,
) -> Row:
    """Return recommendation.json. `confirm_with` belongs to an emulated or predicted answer."""
    if isinstance(answer, Recommendation):
        fields = _measured_fields(job, answer, commands, confirm_with)
    else:
        fields = _predicted_fields(answer, confirm_with)
        fields["commands"] = dict(commands)
    figures = fields.pop("winner")
    return {
        "schema": SCHEMA,
        "status": fields.pop("status"),
        "basis": fields.pop("basis"),
        "recommendation": _recommended_row(job, answer, figures, files),
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


def _recommended_row(
    job: Job,
    answer: Recommendation | Forecast,
    figures: Row | None,
    files: Sequence[str],
) -> Row | None:
    """Return the recommended candidate with its figures; null if nothing is recommended."""
    winner = answer.winner
    if winner is None:
        return None
    learned = {}
    for change in answer.changes:
        if change.effect == "learning":
            learned[change.name] = change.recommended
    return {
        "knobs": dict(winner.candidate.knobs),
        "settings": dict(winner.candidate.settings),
        "changed_learning_knobs": learned,
        "relaxed": dict(answer.relaxed),
        **(figures or {}),
        "limit_bytes": job.memory_limit_bytes,
        "files": list(files),
    }


def _measured_fields(
    job: Job,
    answer: Recommendation,
    commands: Mapping[str, str],
    confirm_with: str,
) -> Row:
    """Return the fields of a measured or emulated answer; `winner`: the figures of its
    recommendation.
    """
    proof = answer.winner and (answer.certificate or answer.winner)
    return {
        "status": _status(answer),
        "basis": job.task.hardware.basis,
        "winner": proof and _winner_fields(job, answer, proof),
        "baseline": _baseline_row(answer),
        "runner_ups": _measured_rows(answer.runner_ups, answer),
        "trade_offs": [_trade_off_row(answer, trial) for trial in answer.trade_offs],
        "nearest_miss": _nearest_miss_row(answer),
        "refuted": list(map(trial_row, answer.refuted)),
        "counts": plain(answer.counts),
        "script": _script_section(job, answer),
        "trials": _measured_rows(answer.trials, answer, with_purpose=True),
        "proven": answer.proven,
        "rows_left_out": answer.rows_left_out,
        "from_record": _record_row(answer),
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
        "advantage": _advantage_row(answer),
        "run_spread": plain(answer.run_spread),
        "gpu_seconds": round(answer.probe_seconds, 2) if job.task.hardware.kind == "cuda" else None,
        "probe_seconds": round(answer.probe_seconds, 2),
        "seconds_per_candidate": _seconds_per_candidate(answer),
        "versions": _versions(answer),
    }


def _baseline_row(answer: Recommendation) -> Row | None:
    baseline = answer.baseline
    if baseline is None:
        return None
    speed = rate(baseline.measurement.ranking_speed)
    return {**_measured_row(baseline, answer), "tokens_per_second": speed}


def _nearest_miss_row(answer: Recommendation) -> Row | None:
    miss = nearest_miss(answer)
    if miss is None:
        return None
    return {**trial_row(miss), "over_bytes": _over_bytes(miss)}


def _record_row(answer: Recommendation) -> Row | None:
    """Return where the answer was recorded, if nothing was measured for it."""
    source = answer.from_record
    if source is None:
        return None
    return {**plain(source), "elapsed_seconds": round(source.elapsed_seconds, 2)}


def _advantage_row(answer: Recommendation) -> Row | None:
    sentence = describe_advantage(answer)
    if not sentence:
        return None
    return {**plain(answer.advantage), "says": sentence}


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
) -> Row:
    measurement = proof.measurement
    return {
        "basis": measurement.basis,
        "tokens_per_second": speeds(measurement),
        "spread": _spread(measurement, answer),
        "peak_memory_bytes": measurement.memory.peak_bytes,
        "phase_peak_bytes": dict(measurement.memory.phase_peak_bytes),
        "certificate": certificate_row(job, answer.certificate),
    }


def _measured_rows(
    trials: Iterable[Trial],
    answer: Recommendation,
    *,
    with_purpose: bool = False,
) -> list[Row]:
    rows = []
    for trial in trials:
        row: Row = {}
        if with_purpose:
            row["purpose"] = trial.purpose
        row.update(_measured_row(trial, answer))
        rows.append(row)
    return rows


def _measured_row(trial: Trial, answer: Recommendation) -> Row:
    return {**trial_row(trial), "spread": _spread(trial.measurement, answer)}


def _spread(measurement: Measurement, answer: Recommendation) -> dict[str, float | None]:
    """Return the relative half width of both speeds' intervals."""
    return {
        "worst": relative_spread(measurement.worst, answer),
        "typical": relative_spread(measurement.typical, answer),
    }


def _trade_off_row(answer: Recommendation, trial: Trial) -> Row:
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


UNMEASURED = ("implied", "probed", "out_of_memory", "failed", "loads")
"""Counts of a measured answer, which are 0 in a predicted one."""


def _predicted_fields(answer: Forecast, confirm_with: str) -> Row:
    """Return the fields of a predicted answer; `winner`: the figures of its recommendation."""
    # 1. What is proven.
    winner = answer.winner
    status = "undecided"
    proven = "not proven infeasible"
    if winner is not None:
        status = "ok"
        proven = "budget spent"
    elif answer.screened == answer.candidates:
        status = "nothing_fits"

    # 2. Candidates.
    trade_offs = []
    for candidate in answer.trade_offs:
        trade_offs.append(
            {"change": differing_knobs(winner, candidate), **predicted_row(candidate)}
        )
    candidates = {
        "winner": winner and _predicted_winner(winner),
        "baseline": answer.baseline and predicted_row(answer.baseline),
        "runner_ups": list(map(predicted_row, answer.runner_ups)),
        "trade_offs": trade_offs,
        "undecided": answer.undecided and predicted_row(answer.undecided),
        "nearest_miss": answer.nearest_miss and predicted_row(answer.nearest_miss),
    }

    # 3. The document's fields, those of a measurement empty.
    return {
        "status": status,
        "basis": "predicted",
        **candidates,
        "counts": {
            "candidates": answer.candidates,
            "predicted": answer.predicted,
            "screened": answer.screened,
            **dict.fromkeys(UNMEASURED, 0),
        },
        "proven": proven,
        "stopped_by": "budget" if answer.ended_by_budget else None,
        "confirm_with": confirm_with,
        "study": None,
        "gpu_seconds": None,
        "versions": {} if winner is None else dict(winner.prediction.versions),
    }


def _predicted_winner(winner: PredictedCandidate) -> Row:
    prediction = winner.prediction
    return {
        "basis": "predicted",
        "tokens_per_second": {
            "worst": middle(prediction.tokens_per_second),
            "typical": middle(prediction.tokens_per_second_at_lengths),
        },
        "peak_memory_bytes": middle(prediction.peak_memory_bytes),
        "prediction": prediction_row(prediction),
        "certificate": None,
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
    assumed: Sequence[str] = (),
) -> Row:
    """Return `predict --json`: one candidate, its ways to fit, and the variants of unknown
    facts. `refusal`: a guarded run in which it ran out of memory. `assumed`: what the reading of
    the user's file rests on.
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
        "assumed": list(assumed),
        "model_is_guess": job.task.workload.model.is_guess,
        "question": job_row(job),
    }


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


def _script_section(job: Job, answer: Recommendation) -> Row | None:
    """Return the document's section about the script; None without one. A patch needs a
    confirmed winner.
    """
    script = job.task.workload.script
    if script is None:
        return None
    section: Row = {
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

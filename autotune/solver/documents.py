"""`solve --json`: one document for a setting, one for hardware."""

from __future__ import annotations

from typing import Any

from autotune.core.job import Job
from autotune.report.answer_document import job_row
from autotune.report.candidate_rows import interval, prediction_row
from autotune.solver.cheapest_hardware import CheapestHardware, PredictedOffer
from autotune.solver.largest_value import LargestValue, Tried

SCHEMA = 1


def value_document(job: Job, found: LargestValue) -> dict[str, Any]:
    """Return the document of a setting."""
    status = "ok" if found.surely else "undecided" if found.possibly else "nothing_fits"
    best = found.surely or found.possibly
    return {
        "schema": SCHEMA,
        "status": status,
        "basis": "predicted",
        "setting": found.setting,
        "given": found.given,
        "surely_fits": found.surely and found.surely.value,
        "may_fit": found.possibly and found.possibly.value,
        "next": found.next and _tried(found.next),
        "prediction": best and best.prediction and prediction_row(best.prediction),
        "settings": dict(best.candidate.settings) if best and best.candidate else None,
        "tried": [_tried(one) for one in found.tried],
        "question": job_row(job),
    }


def hardware_document(job: Job, found: CheapestHardware) -> dict[str, Any]:
    """Return the document of a price list. `question` names the first offer's hardware."""
    undecided = any(one.fits is None for one in found.offers)
    return {
        "schema": SCHEMA,
        "status": "ok" if found.per_hour else "undecided" if undecided else "nothing_fits",
        "basis": "predicted",
        "setting": "gpus",
        "cheapest_per_hour": found.per_hour and found.per_hour.offer.gpus,
        "cheapest_per_step": found.per_step and found.per_step.offer.gpus,
        "currency": found.currency or None,
        "offers": [_offer(one) for one in found.offers],
        "question": job_row(job),
    }


def _tried(one: Tried) -> dict[str, Any]:
    prediction = one.prediction
    return {
        "value": one.value,
        "fits": one.fits,
        "peak_memory_bytes": prediction and interval(prediction.peak_memory_bytes),
        "margin_bytes": prediction and interval(prediction.margin_bytes),
        "refused_because": one.refusal,
    }


def _offer(one: PredictedOffer) -> dict[str, Any]:
    return {
        "gpus": one.offer.gpus,
        "price_per_hour": one.offer.per_hour,
        "fits": one.fits,
        "change": dict(one.change),
        "seconds_per_step": interval(one.step_seconds, 3),
        "cost_per_step": interval(one.step_cost, 6),
        "refused_because": one.refusal,
        "prediction": one.prediction and prediction_row(one.prediction),
    }

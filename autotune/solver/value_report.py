"""JSON and text of the largest value that fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.core.job import Job
from autotune.core.prediction import Prediction
from autotune.core.space import setting_text
from autotune.core.units import format_bytes
from autotune.report.document_rows import interval, job_row, prediction_row
from autotune.report.verdict_text import need_text
from autotune.solver.largest_value import LargestValue, Tried

SCHEMA = 1


def value_document(job: Job, answer: LargestValue) -> dict[str, Any]:
    """Return the document of a setting."""
    status = "nothing_fits"
    if answer.surely is not None:
        status = "ok"
    elif answer.possibly is not None:
        status = "undecided"
    best = answer.surely or answer.possibly
    prediction = None
    settings = None
    if best is not None and best.prediction is not None:
        prediction = prediction_row(best.prediction)
    if best is not None and best.candidate is not None:
        settings = dict(best.candidate.settings)
    return {
        "schema": SCHEMA,
        "status": status,
        "basis": "predicted",
        "setting": answer.setting,
        "given": answer.requested,
        "surely_fits": answer.surely and answer.surely.value,
        "may_fit": answer.possibly and answer.possibly.value,
        "next": answer.next and _attempt_row(answer.next),
        "prediction": prediction,
        "settings": settings,
        "tried": list(map(_attempt_row, answer.tried)),
        "question": job_row(job),
    }


def _attempt_row(attempt: Tried) -> dict[str, Any]:
    prediction = attempt.prediction
    return {
        "value": attempt.value,
        "fits": attempt.fits,
        "peak_memory_bytes": prediction and interval(prediction.peak_memory_bytes),
        "margin_bytes": prediction and interval(prediction.margin_bytes),
        "refused_because": attempt.refusal,
    }


def value_lines(answer: LargestValue) -> Iterator[str]:
    """Yield the answer for a setting."""
    setting = answer.setting
    surely = answer.surely
    possibly = answer.possibly
    yield "Predicted, nothing was measured."
    if surely is not None and surely.prediction is not None:
        yield f"{setting}={surely.value} surely fits: {margin_text(surely.prediction)}"
    else:
        yield f"No value of {setting} surely fits, with the other settings as they are."
    if possibly is not None and possibly.prediction is not None:
        yield f"{setting}={possibly.value} may fit: {margin_text(possibly.prediction)}"
    yield from _next_lines(answer)
    count = len(answer.tried)
    tried = f"{count} values were"
    if count == 1:
        tried = "1 value was"
    yield f"As requested: {setting}={setting_text(answer.requested)}. {tried} tried."


def _next_lines(answer: LargestValue) -> Iterator[str]:
    attempt = answer.next
    if attempt is None:
        yield f"{answer.tried[-1].value} is the largest value that was considered."
        return
    assignment = f"{answer.setting}={attempt.value}"
    if attempt.refusal is not None:
        yield f"{assignment} is refused: {attempt.refusal}"
    elif attempt.prediction is not None:
        yield f"{assignment} does not fit: {margin_text(attempt.prediction)}"


def margin_text(prediction: Prediction) -> str:
    need = need_text(prediction)
    if not prediction.fits:
        return need
    return f"{need}, at least {format_bytes(prediction.margin_bytes.low)} left"

"""Remedies from the failure table: directions, bounded by the figures of the message where it has
them."""

from __future__ import annotations

from autotune.diagnosis.diagnosis import Advice, Diagnosis
from autotune.diagnosis.log_framework import LogFramework
from autotune.failures.numbers import Numbers
from autotune.failures.remedies import Remedy, remedies_for


def advice_for(diagnosis: Diagnosis, framework: LogFramework | None = None) -> tuple[Advice, ...]:
    """Return two or three changes under the framework's names; none where nothing is known, or
    nothing failed."""
    if diagnosis.cause is None:
        return ()
    remedies = remedies_for(diagnosis.cause, diagnosis.row)
    if framework is not None:
        remedies = framework.translated(remedies)
    return tuple(_advice(remedy, diagnosis.numbers) for remedy in remedies)


def _advice(remedy: Remedy, numbers: Numbers) -> Advice:
    bound = numbers.get(remedy.bounded_by or "")
    return Advice(change={name: _bounded(way, bound) for name, way in remedy.change.items()}, why=remedy.why)


def _bounded(direction: str, bound: int | float | None) -> str:
    if bound is None:
        return direction
    return f"{direction}, to at most {bound if isinstance(bound, int) else format(bound, '.2f')}"

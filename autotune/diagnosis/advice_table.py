"""Remedies from the failure table: directions, bounded by the figures of the message where it has
them."""

from __future__ import annotations

from autotune.diagnosis.diagnosis import Advice, Diagnosis
from autotune.diagnosis.log_framework import LogFramework
from autotune.failures.remedies import remedies_for


def advice_for(diagnosis: Diagnosis, framework: LogFramework | None = None) -> tuple[Advice, ...]:
    """Return two or three changes under the framework's names; none where nothing is known, or
    nothing failed."""
    if diagnosis.cause is None:
        return ()
    remedies = remedies_for(diagnosis.cause, diagnosis.row)
    if framework is not None:
        remedies = framework.translated(remedies)
    bounds = [diagnosis.numbers.get(remedy.bounded_by or "") for remedy in remedies]
    return tuple(
        Advice(change={name: _bounded(way, bound) for name, way in remedy.change.items()}, why=remedy.why)
        for remedy, bound in zip(remedies, bounds, strict=True)
    )


def _bounded(direction: str, bound: int | float | None) -> str:
    if bound is None:
        return direction
    return f"{direction}, to at most {bound if isinstance(bound, int) else format(bound, '.2f')}"

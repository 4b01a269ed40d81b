"""Why step models miss a bar of `step_models.py` at a point: a text for each cause that is left.

A cause is found by comparing the blocks of the model with those of the point's own trace. An
exception is explained by the first cause whose family it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of exceptions, and what their points have in common."""

    figure: str  # the bar that is missed
    family: Mapping[str, object]
    text: str


CAUSES: Sequence[Cause] = (
    Cause(
        figure="device",
        family={"tuning": "full", "model": "Qwen2.5-0.5B", "gpus": "A100-40G"},
        text=(
            "requested bytes are equal within 0.01 %; rows of a generation, one after the other,"
            " make tensors of which one is above 1 MiB in the trace and keeps a cached segment"
            " from being used again; scaled ones are below"
        ),
    ),
    Cause(
        figure="allocated",
        family={"method": "sft", "sharding": "zero2"},
        text=(
            "requested bytes of all phases and device memory are equal; blocks that torch does not"
            " split lie elsewhere"
        ),
    ),
)


def explanation_of(row: Mapping[str, Any], missed: Sequence[str]) -> str | None:
    """Return why this row misses these bars; None if no cause is known."""
    for cause in CAUSES:
        if cause.figure not in missed:
            continue
        if cause.family.items() <= row["family"].items():
            return cause.text
    return None

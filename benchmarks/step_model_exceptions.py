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

    figures: Sequence[str]  # bars of which at least one is missed
    family: Mapping[str, object]
    text: str


REFERENCE = (
    "surveyed before a reference's layers were marked: its pass was a single block, so further"
    " layers had the sizes of the first traced point, and their outputs lived to the pass's end."
    " Surveyed anew, families of 0.5B, 0.6B, 1.5B and 1.7B are equal"
)
JOINED = (
    "surveyed before tensors had formulas of their own into which the rows of a loop are joined:"
    " joined prompts and completions grew by one factor, so that one of them was below 1 MiB, left"
    " the pool of large blocks, and a cached segment was free that the trace has in use"
)
OLDER = (
    "surveyed before pieces of logits, groups of an optimizer and loops over rows were mended;"
    " the family surveyed anew is equal at this point"
)

CAUSES: Sequence[Cause] = (
    Cause(
        figures=("allocated", "device"),
        family={"tuning": "full", "method": "dpo"},
        text=REFERENCE,
    ),
    Cause(
        figures=("allocated",),
        family={"method": "sft", "sharding": "zero2"},
        text=(
            "requested bytes of all phases and device memory are equal; blocks that torch does not"
            " split lie elsewhere"
        ),
    ),
    Cause(
        figures=("device",),
        family={"tuning": "full", "model": "Qwen2.5-0.5B", "gpus": "A100-40G"},
        text=JOINED,
    ),
    Cause(
        figures=("device",),
        family={"tuning": "full", "model": "Qwen2.5-1.5B", "use_vllm": True},
        text=OLDER,
    ),
    Cause(
        figures=("device",),
        family={"dtype": "float32"},
        text=OLDER,
    ),
)


def explanation_of(row: Mapping[str, Any], missed: Sequence[str]) -> str | None:
    """Return why this row misses these bars; None if no cause is known."""
    for cause in CAUSES:
        is_of_family = cause.family.items() <= row["family"].items()
        if is_of_family and not set(cause.figures).isdisjoint(missed):
            return cause.text
    return None

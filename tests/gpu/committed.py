"""Files that `make first-light` wrote on a machine with a GPU, and what they say they measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]
NOT_RUN = ("illegal", "failed to start")
STEPS_WITH_POINTS = ("sft", "colocated", "shares", "quantised", "rollouts")


def complaints(lines: Sequence[Line]) -> list[str]:
    """Return the ways in which a file differs from what it says it holds: a machine, a date, and a
    point for each step that ended well.
    """
    texts = []
    starts = 0
    has_points_step = False
    for line in lines:
        if line["basis"] != "measured":
            texts.append(f"a line is {line['basis']}, not measured")
        if line["kind"] == "start" and line["machine"].get("date"):
            starts += 1
        if line["kind"] == "step" and line["outcome"] == "ok":
            has_points_step |= line["name"] in STEPS_WITH_POINTS
    if not starts:
        texts.append("no machine and no date")
    if has_points_step and not measured_points(lines):
        texts.append("a step of points ended well, and there is no point")
    return texts


def measured_points(lines: Iterable[Line]) -> dict[str, Line]:
    """Return the points that a process has tried, by key."""
    points = {}
    for line in lines:
        if line["kind"] == "point" and line["outcome"] not in NOT_RUN:
            points[line["key"]] = line
    return points

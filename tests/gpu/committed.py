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
    starts = [line for line in lines if line["kind"] == "start"]
    if not starts or not starts[0]["machine"].get("date"):
        texts.append("no machine and no date")
    wrong = [line for line in lines if line.get("basis", "measured") != "measured"]
    if wrong:
        texts.append(f"{len(wrong)} lines are not measured")
    points = measured_points(lines)
    ended_well = {line["name"] for line in lines if line["kind"] == "step" and is_ok(line)}
    if ended_well & set(STEPS_WITH_POINTS) and not points:
        texts.append("a step of points ended well, and there is no point")
    return texts


def measured_points(lines: Iterable[Line]) -> dict[str, Line]:
    """Return the points that a process has tried, by key."""
    points = {}
    for line in lines:
        if line["kind"] == "point" and line["outcome"] not in NOT_RUN:
            points[line["key"]] = line
    return points


def is_ok(line: Line) -> bool:
    return bool(line["outcome"] == "ok")

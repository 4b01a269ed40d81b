"""Training speed on cards of our own, in the table of `make bench-cards`: points of
`make first-light` that ended well, with the predictions that were committed before and those of
today.

First readings are those of predicted.json, which was committed before the point was measured.
Second readings are those of the code as it is. The catalogue has the first card's rates (products,
attention, memory, launches), not the points. Three things were found in the points, and are second
readings in every sense: products that are added to a float32 sum were timed at the float32 rate,
the upper end of what a host takes to launch a kernel, and what an adapter launches while
transformers generates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from gpu_points import key_of, ladder_of
from gpu_setups import COLOCATED, ROLLOUTS, SFT, SHARES, Setup

from autotune.core.prediction import Estimate
from autotune.prediction.service import predict_candidates

CARD = "H200"
FOLDER = Path(__file__).resolve().parent / "results" / "first-light"
RUNS = ("H200", "H200-second")
"""Folders of the runs, in their order: each was on another card, in another machine."""

DISTINCT = 1.04
"""Ratio of two speeds whose order counts."""

CLOSE = 0.25
"""Largest error that counts as close."""

READINGS = ("first", "second")
Line = dict[str, Any]


def compared_points() -> list[Line]:
    """Return the points that ended well, with both readings of their tokens per second.

    A point that a later run repeats has that measurement beside its own.
    """
    today: dict[str, tuple[Setup, Estimate]] = {}
    for setup in (*SFT, *COLOCATED, *SHARES, *ROLLOUTS):
        for key, estimate in _predicted(setup).items():
            today[key] = (setup, estimate)
    lines: dict[str, Line] = {}
    for number, run in enumerate(RUNS, start=1):
        first_readings = json.loads((FOLDER / run / "predicted.json").read_text())
        measured = _measured_points(run)
        for key, (setup, estimate) in today.items():
            if key not in measured:
                continue
            point = measured[key]
            if key in lines:
                lines[key]["repeated"] = round(point["tokens_per_second"])
                continue
            lines[key] = {
                "setup": point["setup"],
                "point": point["point"],
                "method": setup.method,
                "run": number,
                "measured": round(point["tokens_per_second"]),
                "first": first_readings[key]["tokens_per_second"],
                "second": {
                    "value": estimate.value,
                    "low": estimate.low,
                    "high": estimate.high,
                },
            }
    return list(lines.values())


def _measured_points(run: str) -> dict[str, Line]:
    points = {}
    for text in (FOLDER / run / "results.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["kind"] == "point" and line["outcome"] == "ok":
            points[line["key"]] = line
    return points


def _predicted(setup: Setup) -> dict[str, Estimate]:
    """Return today's tokens per second of a setup's points, by key."""
    ladder = ladder_of(setup, CARD, mode="predict")
    candidates = []
    for point in setup.points:
        candidate = ladder.candidate(point)
        if ladder.refusal(candidate) is None:
            candidates.append(candidate)
    request = ladder.request
    predictions = predict_candidates(request.job, request.trainer, candidates)
    rates = {}
    for candidate in candidates:
        prediction = predictions.get(candidate.id)
        if prediction is not None and prediction.tokens_per_second is not None:
            rates[key_of(setup, candidate)] = prediction.tokens_per_second
    return rates


def figures(lines: Sequence[Line]) -> dict[str, Any]:
    """Return errors, coverage and order of both readings; of 7B models and of smaller ones, too."""
    large: list[Line] = []
    small: list[Line] = []
    for line in lines:
        group = large if "7B" in line["setup"] else small
        group.append(line)
    counted = {}
    for reading in READINGS:
        counted[reading] = _figures(lines, reading)
        for size, group in (("7B", large), ("smaller", small)):
            if group:
                counted[f"{reading}, {size}"] = _figures(group, reading)
    return counted


def _figures(lines: Sequence[Line], reading: str) -> dict[str, Any]:
    errors = []
    close = 0
    inside = 0
    for line in lines:
        rate = line[reading]
        errors.append(abs(rate["value"] / line["measured"] - 1))
        close += errors[-1] <= CLOSE
        inside += rate["low"] <= line["measured"] <= rate["high"]
    right, pairs = order(lines, reading)
    return {
        "rows": len(lines),
        "median": round(median(errors), 4),
        "within_25_percent": close,
        "worst": round(max(errors), 4),
        "inside": inside,
        "order": {"pairs": pairs, "right": right},
    }


def order(lines: Sequence[Line], reading: str) -> tuple[int, int]:
    """Count the pairs of one method in the right order, and all that differ."""
    right = 0
    pairs = 0
    for first, second in combinations(lines, 2):
        measured = (first["measured"], second["measured"])
        if first["method"] != second["method"] or max(measured) < DISTINCT * min(measured):
            continue
        pairs += 1
        is_faster = first[reading]["value"] > second[reading]["value"]
        right += is_faster == (measured[0] > measured[1])
    return right, pairs


def section(lines: Sequence[Line], counted: Mapping[str, Any]) -> Iterator[str]:
    """Yield the page's lines about our own card."""
    yield "## Measured by us: two H200"
    yield ""
    yield (
        "Points of `make first-light` on 2026-11-27, torch 2.11, in two runs on two cards and"
        " slow hosts (a linear layer takes both 27 microseconds). First reading: committed before"
        " the point was measured. Second reading: the code of this page, whose catalogue has the"
        " first card's rates. In sample, because points showed them: that TRL's head multiplies in"
        " bfloat16 and sums in float32, the upper end of what a launch takes the host, that an"
        " engine's host works for each sequence, and what an adapter launches while transformers"
        " generates. Repeated: the same point in the second run."
    )
    yield ""
    yield (
        "| reading | points | median error | within 25 % | worst | inside the interval |"
        " order of settings |"
    )
    yield "|---|---|---|---|---|---|---|"
    for reading, row in counted.items():
        pairs = row["order"]
        yield (
            f"| {reading} | {row['rows']} | {row['median']:.1%} | {row['within_25_percent']} |"
            f" {row['worst']:.1%} | {row['inside']} | {pairs['right']} of {pairs['pairs']} |"
        )
    yield ""
    yield (
        "| setup | point | run | measured tokens/s | repeated | first reading | second reading |"
    )
    yield "|---|---|---|---|---|---|---|"
    for line in lines:
        cells = [line["setup"], line["point"], str(line["run"]), str(line["measured"])]
        cells.append(str(line.get("repeated", "")))
        for reading in READINGS:
            rate = line[reading]
            ratio = rate["value"] / line["measured"]
            cells.append(
                f"{rate['value']:.0f} ({rate['low']:.0f} to {rate['high']:.0f}), {ratio:.2f}"
            )
        yield f"| {' | '.join(cells)} |"

"""Committed measurements on GPUs, compared with the predictions of the same points."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FOLDERS = sorted(
    folder.parent for folder in RESULTS.glob("*/transformers.json") if folder.parent.name != "cpu"
)


@pytest.fixture(
    scope="module",
    params=FOLDERS,
    ids=lambda folder: folder.name,
)
def parts(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {file.stem: json.loads(file.read_text()) for file in request.param.glob("*.json")}


def rows(parts: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Return the points that ended well and have a prediction: only there both figures cover a
    whole step.
    """
    all_rows = []
    for name in names:
        if name in parts:
            all_rows.extend(parts[name]["rows"])
    return [row for row in all_rows if row["outcome"] == "ok" and row["predicted"]]


def off(
    rows: list[dict[str, Any]],
    measured: str,
    predicted: str,
) -> float:
    """The median of the relative distances."""
    pairs = []
    for row in rows:
        if row[measured] is not None:
            pairs.append((row[measured], row["predicted"][predicted]["value"]))
    assert pairs
    return statistics.median(abs(predicted - real) / real for real, predicted in pairs)


def test_enough_was_measured(parts: dict[str, Any]) -> None:
    assert parts["transformers"]["counts"]["points"] >= 40
    assert parts["transformers"]["counts"]["out_of_memory"] >= 8
    if "colocated" in parts:
        assert parts["colocated"]["counts"]["points"] >= 20


def test_torch_memory_is_predicted_within_one_percent(parts: dict[str, Any]) -> None:
    assert (
        off(rows(parts, "transformers"), "torch_allocated_bytes", "torch_peak_allocated_bytes")
        <= 0.01
    )


def test_device_memory_is_predicted_within_three_percent(parts: dict[str, Any]) -> None:
    assert off(rows(parts, "transformers", "colocated"), "peak_bytes", "peak_memory_bytes") <= 0.03


def test_no_point_that_fitted_was_refused(parts: dict[str, Any]) -> None:
    for row in rows(parts, "transformers", "colocated"):
        assert row["predicted"]["fits"] is not False

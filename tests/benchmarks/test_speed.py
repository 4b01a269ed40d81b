"""Report of bench-speed, on rows whose figures are known by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import speed_report


def row(
    name: str,
    predicted: float,
    measured: float,
    *,
    held_back: bool = True,
    model: str = "a",
) -> dict[str, Any]:
    return {
        "id": name,
        "url": "https://x",
        "environment": "e",
        "model": model,
        "gpus": 1,
        "tuning": "full",
        "framework_config": "none",
        "micro_batch": 1,
        "length": 8,
        "class": "full",
        "held_back": held_back,
        "predicted": predicted,
        "low": 0.9 * predicted,
        "high": 1.1 * predicted,
        "measured": measured,
        "error": predicted / measured - 1,
    }


ROWS = [
    row("1", 110, 100),
    row("2", 220, 200),
    row("3", 210, 300),
    row("4", 55, 50, held_back=False),
]


def test_errors_intervals_and_order() -> None:
    result = speed_report.summary(ROWS[:3])
    assert result["median"] == pytest.approx(0.1)
    assert result["within_20_percent"] == result["inside"] == pytest.approx(2 / 3, abs=1e-4)
    assert result["order"] == {"pairs": 3, "right": 2}


def test_a_pair_that_measured_alike_has_no_order() -> None:
    assert speed_report.order([row("1", 1, 100), row("2", 2, 101)]) == {"pairs": 0, "right": 0}


def test_calibration_uses_rows_that_share_the_facts_alone() -> None:
    result = speed_report.one_row_calibration(
        ROWS[:2], [ROWS[3], row("5", 1, 100, model="b")], ("model", "gpus")
    )
    assert result == {"pairs": 2, "median": 0.0, "median_before": pytest.approx(0.1)}


def test_a_row_that_could_not_be_traced_fails_the_bars_and_is_listed() -> None:
    failed = {}
    for name, value in ROWS[0].items():
        if name not in ("predicted", "low", "high", "measured"):
            failed[name] = value
    document = speed_report.document([*ROWS, {**failed, "id": "6", "error": "no environment"}], {})
    assert not document["bars_met"]
    assert "no environment" in speed_report.readable(document)

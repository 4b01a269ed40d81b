"""Committed comparisons of step models with traces: every exception is listed and explained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from step_models import missed_bars  # noqa: E402

FILES = sorted((BENCHMARKS / "results").glob("step_models*.json"))


def row(**figures: float) -> dict[str, Any]:
    return {"allocated": 0.0, "device": 0.0, "speed": 0.0, "fits": [True, True], **figures}


def test_a_row_misses_the_bars_that_its_figures_exceed() -> None:
    assert missed_bars(row(allocated=0.0005, device=-0.003, speed=0.02)) == []
    assert missed_bars(row(allocated=-0.00051)) == ["allocated"]
    assert missed_bars(row(device=0.0031, speed=-0.021)) == ["device", "speed"]
    assert missed_bars({**row(), "fits": [True, None]}) == ["verdict"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.stem))
def test_every_exception_is_listed_and_explained(file: Path) -> None:
    document = json.loads(file.read_text())
    missed = [row["knobs"] for row in document["rows"] if missed_bars(row)]
    assert [row["knobs"] for row in document["exceptions"]] == missed
    for exception in document["exceptions"]:
        assert exception["explanation"], exception["family"]

"""Committed measurements on GPUs, compared with the predictions of the same points."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.gpu.committed import Document, Row, comparable, complaints

pytestmark = pytest.mark.gpu

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
POINTS = ("transformers", "colocated", "quantised")  # parts that measure points, not a search
FILES = [file for file in sorted(RESULTS.glob("*/*.json")) if file.stem in POINTS]


@pytest.fixture(
    scope="module",
    params=[file for file in FILES if file.parent.name != "cpu"],
    ids=lambda file: f"{file.parent.name}-{file.stem}",
)
def document(request: pytest.FixtureRequest) -> Document:
    content: Document = json.loads(request.param.read_text())
    return content


def median_error(
    rows: list[Row],
    measured: str,
    predicted: str,
) -> float:
    """Return the median of the relative distances."""
    errors = []
    for row in rows:
        if row[measured] is not None:
            errors.append(abs(row["predicted"][predicted]["value"] / row[measured] - 1))
    if not errors:
        pytest.skip("no point that ended well has both figures")
    return statistics.median(errors)


def test_a_file_holds_what_it_says_it_measured(document: Document) -> None:
    assert complaints(document) == []


def test_torch_memory_is_predicted_within_one_percent(document: Document) -> None:
    rows = comparable(document, with_engine=False)
    assert median_error(rows, "torch_allocated_bytes", "torch_peak_allocated_bytes") <= 0.01


def test_device_memory_is_predicted_within_three_percent(document: Document) -> None:
    rows = comparable(document, with_engine=True)
    assert median_error(rows, "peak_bytes", "peak_memory_bytes") <= 0.03


def test_no_point_that_fitted_was_refused(document: Document) -> None:
    for row in comparable(document, with_engine=True):
        assert row["predicted"]["fits"] is not False

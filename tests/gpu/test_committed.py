"""Committed measurements on GPUs, compared with the predictions of the same points."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

from tests.gpu.committed import complaints

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from first_light_page import (  # noqa: E402
    ALLOCATED,
    DEVICE,
    differences,
    disagreements,
    read_results,
)
from gpu_record import FILE, read_lines  # noqa: E402

pytestmark = pytest.mark.gpu

RESULTS = ROOT / "benchmarks" / "results" / "first-light"
FOLDERS = [path.parent for path in sorted(RESULTS.glob(f"*/{FILE}"))]


@pytest.fixture(
    scope="module",
    params=FOLDERS,
    ids=lambda folder: folder.name,
)
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def median_difference(folder: Path, figure: str) -> float:
    """Return the median of the relative distances of the points that ended well."""
    shares = []
    for difference in differences(read_results(folder)):
        if difference.figure == figure and difference.basis == "measured":
            shares.append(abs(difference.share))
    assert shares, "no point that ended well has both figures"
    return statistics.median(shares)


def test_a_file_holds_what_it_says_it_measured(folder: Path) -> None:
    assert complaints(read_lines(folder / FILE)) == []


def test_torch_memory_is_predicted_within_one_percent(folder: Path) -> None:
    assert median_difference(folder, ALLOCATED) <= 0.01


def test_device_memory_is_predicted_within_three_percent(folder: Path) -> None:
    assert median_difference(folder, DEVICE) <= 0.03


def test_no_point_that_fitted_was_refused(folder: Path) -> None:
    assert disagreements(read_results(folder)) == []

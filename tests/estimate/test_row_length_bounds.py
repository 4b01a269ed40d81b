"""Verdicts between the longest rows and the shortest possible ones."""

from __future__ import annotations

import dataclasses

from autotune.core.prediction import Estimate, Prediction
from autotune.estimate.unknown_facts import ROW_LENGTHS, with_lower_bound
from tests.estimate.test_predictor import predicted

LONG = predicted()


def at(value: float, fits: bool | None) -> Prediction:
    peak = Estimate(value=value, low=0.9 * value, high=1.1 * value)
    return dataclasses.replace(LONG, peak_memory_bytes=peak, fits=fits, depends_on=("else",) if fits is None else ())


def test_a_fit_of_the_longest_rows_is_a_fit() -> None:
    assert with_lower_bound(at(50, True), at(10, True)) == at(50, True)


def test_a_misfit_of_one_row_is_a_misfit() -> None:
    found = with_lower_bound(at(200, False), at(120, False))
    assert found.fits is False and found.depends_on == ()


def test_otherwise_the_verdict_depends_on_the_data() -> None:
    found = with_lower_bound(at(200, False), at(50, True))
    assert found.fits is None and found.depends_on == (ROW_LENGTHS,)
    assert found.peak_memory_bytes == dataclasses.replace(
        at(200, False).peak_memory_bytes, low=at(50, True).peak_memory_bytes.low
    )
    assert with_lower_bound(at(100, None), at(50, True)).depends_on == (ROW_LENGTHS, "else")

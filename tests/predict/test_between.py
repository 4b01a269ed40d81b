"""A verdict between the longest rows and the least that data can make of them."""

from __future__ import annotations

import dataclasses

from autotune.predict.between import DATA, between
from autotune.prediction import Estimate, Prediction
from tests.predict.test_predictor import predicted

LONG = predicted()


def at(value: float, fits: bool | None) -> Prediction:
    peak = Estimate(value=value, low=0.9 * value, high=1.1 * value)
    return dataclasses.replace(LONG, peak_memory_bytes=peak, fits=fits, depends_on=("else",) if fits is None else ())


def test_what_fits_at_its_longest_fits() -> None:
    assert between(at(50, True), at(10, True)) == at(50, True)


def test_what_does_not_fit_with_one_row_does_not_fit() -> None:
    found = between(at(200, False), at(120, False))
    assert found.fits is False and found.depends_on == ()


def test_in_between_it_is_the_data_that_decide() -> None:
    found = between(at(200, False), at(50, True))
    assert found.fits is None and found.depends_on == (DATA,)
    assert found.peak_memory_bytes == dataclasses.replace(
        at(200, False).peak_memory_bytes, low=at(50, True).peak_memory_bytes.low
    )
    assert between(at(100, None), at(50, True)).depends_on == (DATA, "else")

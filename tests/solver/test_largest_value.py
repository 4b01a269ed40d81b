"""The bisection against a search through all values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.errors import BadInput
from autotune.core.prediction import Estimate, Prediction
from autotune.solver.largest_value import (
    LargestValue,
    LargestValueSearch,
    Number,
    Tried,
    values_from,
)


def solved(
    start: Number,
    limit: int,
    need: Callable[[Number], int],
    legal: Callable[[Number], bool],
) -> LargestValue:
    """Every prediction is need..1.2 need; `tried` counts them."""

    def predict(value: Number) -> Tried:
        if not legal(value):
            return Tried(value=value, refusal="refused")
        low, high = need(value), int(1.2 * need(value))
        fits = True if high <= limit else False if low > limit else None
        peak = Estimate(
            value=low,
            low=low,
            high=high,
        )
        prediction = Prediction(
            candidate_id=str(value),
            basis="traced",
            fits=fits,
            limit_bytes=limit,
            peak_memory_bytes=peak,
            torch_peak_allocated_bytes=peak,
            torch_peak_reserved_bytes=peak,
        )
        return Tried(value=value, prediction=prediction)

    return LargestValueSearch(
        setting="x",
        values=values_from(start),
        is_legal=legal,
        predict=predict,
    ).run(start)


@given(
    start=st.integers(1, 5000),
    limit=st.integers(1_000, 3_000_000),
    fixed=st.integers(0, 100_000),
    divides=st.sampled_from([0, 48, 64, 1000]),
)
def test_the_largest_value_of_all(
    start: int,
    limit: int,
    fixed: int,
    divides: int,
) -> None:
    """Values that must divide a batch are refused between those that do."""

    def legal(value: Number) -> bool:
        return divides == 0 or divides % value == 0

    if divides:
        start = min(start, 8) if divides % min(start, 8) == 0 else 1
    result = solved(start, limit, lambda value: fixed + 100 * int(value), legal)
    everyone = [value for value in values_from(start) if legal(value)]
    surely = [value for value in everyone if int(1.2 * (fixed + 100 * value)) <= limit]
    possibly = [value for value in everyone if fixed + 100 * value <= limit]
    assert (result.surely and result.surely.value) == max(surely, default=None)
    expected = max(possibly, default=None)
    assert (result.possibly and result.possibly.value) == (
        None if expected == max(surely, default=None) else expected
    )
    assert len(result.tried) <= 40


def test_a_share_is_searched_in_hundredths() -> None:
    result = solved(0.3, 84, lambda value: int(100 * value), lambda value: True)
    assert result.surely is not None and result.surely.value == 0.7
    assert result.possibly is not None and result.possibly.value == 0.84


def test_memory_that_falls_or_stays_is_refused() -> None:
    with pytest.raises(BadInput, match="a larger value takes less memory"):
        solved(4, 1000, lambda value: int(10_000 / value), lambda value: True)
    with pytest.raises(BadInput, match="without effect on memory"):
        solved(4, 1000, lambda value: 10, lambda value: True)


def test_memory_that_grows_along_a_line_takes_few_values() -> None:
    """0.4 bytes each of at most 10,000: 20,480 surely, 24,576 possibly.

    Tried are 1,000 and its doubles up to 32,256, then 40,960 as the double of the first answer. Of
    the twenty values between two doubles each answer takes the one expected and the one above.
    """
    result = solved(1000, 10_000, lambda value: int(0.4 * value), lambda value: True)
    assert result.surely is not None and result.surely.value == 20_480
    assert result.possibly is not None and result.possibly.value == 24_576
    assert len(result.tried) == 6 + 1 + 2 + 2

"""Alignment of a short model's allocations with a longer model's."""

from __future__ import annotations

import pytest

from autotune.estimate.screening.blocks import NotUniform
from autotune.estimate.screening.stretching import aligned

LAYER = [(100, 0), (8, 0), (100, 0)]


def test_additional_layers_are_one_run() -> None:
    short = [(7, 0), *LAYER * 3, (9, 0)]
    long = [(7, 0), *LAYER * 4, (9, 0)]
    places = aligned(short, long)
    assert [long[place] for place in places] == short
    missing = sorted(set(range(len(long))) - set(places))
    assert missing == list(range(missing[0], missing[0] + len(LAYER)))


def test_an_allocation_over_all_layers_is_larger_and_still_matched() -> None:
    """Clipping allocates a norm for each parameter, their list, and a few more of the same size."""
    short = [*[(2, 6)] * 38, (315_856, 6), (76, 6), *[(2, 6)] * 5]
    long = [*[(2, 6)] * 50, (415_600, 6), (100, 6), *[(2, 6)] * 5]
    places = aligned(short, long)
    assert [long[place] for place in places] == [*short[:38], (415_600, 6), (100, 6), *short[40:]]
    assert places[-5:] == [52, 53, 54, 55, 56]


def test_a_run_may_be_at_either_end() -> None:
    assert aligned([(5, 0)], [(1, 0), (5, 0)]) == [1]
    assert aligned([(5, 0)], [(5, 0), (1, 0)]) == [0]
    assert aligned([], [(1, 0)]) == []
    assert aligned([(5, 0)], [(5, 0)]) == [0]


@pytest.mark.parametrize("longer", [[(5, 0)], [(5, 0), (6, 1), (4, 0)]], ids=["fewer", "of another kind"])
def test_every_short_allocation_needs_a_match(longer: list[tuple[int, int]]) -> None:
    with pytest.raises(NotUniform, match="longer model"):
        aligned([(5, 0), (6, 0)], longer)

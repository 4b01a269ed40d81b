"""Which of a longer model's allocations are the short one's."""

from __future__ import annotations

import pytest

from autotune.predict.pieces.aligning import aligned
from autotune.predict.pieces.blocks import NotUniform

LAYER = [(100, 0), (8, 0), (100, 0)]


def test_more_layers_are_one_run_among_what_stays() -> None:
    short = [(7, 0), *LAYER * 3, (9, 0)]
    long = [(7, 0), *LAYER * 4, (9, 0)]
    places = aligned(short, long)
    assert [long[place] for place in places] == short
    missing = sorted(set(range(len(long))) - set(places))
    assert missing == list(range(missing[0], missing[0] + len(LAYER)))


def test_what_is_put_together_from_all_of_them_is_larger_and_still_found() -> None:
    """As clipping does it: a norm for each parameter, their list, and a few more that look like them."""
    short = [*[(2, 6)] * 38, (315_856, 6), (76, 6), *[(2, 6)] * 5]
    long = [*[(2, 6)] * 50, (415_600, 6), (100, 6), *[(2, 6)] * 5]
    places = aligned(short, long)
    assert [long[place] for place in places] == [*short[:38], (415_600, 6), (100, 6), *short[40:]]
    assert places[-5:] == [52, 53, 54, 55, 56]


def test_a_run_may_stand_at_either_end() -> None:
    assert aligned([(5, 0)], [(1, 0), (5, 0)]) == [1]
    assert aligned([(5, 0)], [(5, 0), (1, 0)]) == [0]
    assert aligned([], [(1, 0)]) == []
    assert aligned([(5, 0)], [(5, 0)]) == [0]


@pytest.mark.parametrize("longer", [[(5, 0)], [(5, 0), (6, 1), (4, 0)]], ids=["fewer", "of another kind"])
def test_what_the_short_one_has_must_be_there(longer: list[tuple[int, int]]) -> None:
    with pytest.raises(NotUniform, match="longer model"):
        aligned([(5, 0), (6, 0)], longer)

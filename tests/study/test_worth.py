"""What is still worth measuring, and what is given up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from autotune.study.beliefs import Beliefs
from autotune.study.facts import Facts
from autotune.study.regression import Posterior
from autotune.study.worth import promising

BEST = 100.0


def believed(speeds: Sequence[float], deviation: float, fits: Sequence[float], *, in_common: float = 0.0) -> Beliefs:
    """Of these, and of a leader after them, of whose speed all is known but what it has `in_common` with the others."""
    count = len(speeds) + 1
    doubts = np.array([*[math.hypot(deviation, in_common)] * len(speeds), in_common])
    speed = Posterior(np.log(np.array([*speeds, BEST])), doubts, 0.01, lambda place: np.full(count, in_common**2))
    need, none = Posterior(np.zeros(count), np.ones(count), 0.01), np.zeros(count, dtype=bool)
    return Beliefs(facts=Facts(impossible=none, possible=none), need=need, speed=speed, fits=np.array([*fits, 1.0]), refused=none)


def is_promising(beliefs: Beliefs) -> list[bool]:
    leader = len(beliefs.fits) - 1
    return list(promising(beliefs, np.arange(leader), leader))


def test_what_may_be_a_little_faster_is_worth_a_probe_where_it_surely_fits_and_not_where_it_hardly_does() -> None:
    beliefs = believed([BEST] * 3, 0.03, [1.0, 0.5, 0.3])
    assert is_promising(beliefs) == [True, True, False]


def test_a_great_gain_is_worth_a_risk() -> None:
    assert is_promising(believed([2 * BEST], 0.05, [0.2])) == [True]
    assert is_promising(believed([2 * BEST], 0.05, [0.05])) == [False]


@pytest.mark.parametrize("fits", [0.0, 0.01])
def test_what_cannot_fit_is_given_up_however_fast(fits: float) -> None:
    assert is_promising(believed([math.e * BEST], 0.5, [fits])) == [False]


def test_what_nobody_knows_of_both_makes_neither_faster_than_the_other() -> None:
    beliefs = believed([BEST], 0.005, [1.0], in_common=0.2)
    assert is_promising(beliefs) == [False]
    assert is_promising(believed([BEST], 0.2, [1.0])) == [True]

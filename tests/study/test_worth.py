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


def believed(speeds: Sequence[float], deviation: float, fits: Sequence[float]) -> Beliefs:
    none, count = np.zeros(len(speeds), dtype=bool), len(speeds)
    speed = Posterior(np.log(np.array(speeds)), np.full(count, deviation), 0.01)
    need = Posterior(np.zeros(count), np.ones(count), 0.01)
    return Beliefs(facts=Facts(impossible=none, possible=none), need=need, speed=speed, fits=np.array(fits), refused=none)


def is_promising(beliefs: Beliefs, *, untried: bool = False) -> list[bool]:
    count = len(beliefs.fits)
    return list(promising(beliefs, np.arange(count), BEST, np.full(count, untried)))


def test_what_may_be_a_little_faster_is_worth_a_probe_where_it_surely_fits_and_not_where_it_hardly_does() -> None:
    beliefs = believed([BEST] * 3, 0.03, [1.0, 0.5, 0.3])
    assert is_promising(beliefs) == [True, True, False]


def test_a_great_gain_is_worth_a_risk() -> None:
    assert is_promising(believed([2 * BEST], 0.05, [0.2])) == [True]
    assert is_promising(believed([2 * BEST], 0.05, [0.05])) == [False]


@pytest.mark.parametrize("fits", [0.0, 0.01])
def test_what_cannot_fit_is_given_up_however_fast(fits: float) -> None:
    assert is_promising(believed([math.e * BEST], 0.5, [fits])) == [False]


def test_a_switch_that_nobody_tried_is_given_up_later() -> None:
    beliefs = believed([0.9 * BEST], 0.08, [1.0])
    assert is_promising(beliefs) == [False] and is_promising(beliefs, untried=True) == [True]

"""Acquisition: candidates worth measuring and candidates given up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from autotune.search.agenda import promising
from autotune.search.surrogate.estimates import Estimates
from autotune.search.surrogate.gaussian_process import Posterior

BEST = 100.0
WORTHWHILE_GAIN = 0.003


def believed(
    speeds: Sequence[float],
    deviation: float,
    fits: Sequence[float],
    *,
    in_common: float = 0.0,
) -> Estimates:
    """Return estimates of these and of a leader after them, whose only uncertainty is the one
    `in_common`.
    """
    count = len(speeds) + 1
    doubts = np.array([*[math.hypot(deviation, in_common)] * len(speeds), in_common])
    speed = Posterior(
        np.log(np.array([*speeds, BEST])), doubts, 0.01, lambda index: np.full(count, in_common**2)
    )
    need = Posterior(np.zeros(count), np.ones(count), 0.01)
    none = np.zeros(count, dtype=bool)
    return Estimates(
        need=need,
        speed=speed,
        fits=np.array([*fits, 1.0]),
        refused=none,
    )


def is_promising(estimates: Estimates) -> list[bool]:
    leader = len(estimates.fits) - 1
    least = np.full(leader, WORTHWHILE_GAIN)
    return list(promising(estimates, np.arange(leader), leader, least))


def test_what_may_be_a_little_faster_is_worth_a_probe_only_where_it_surely_fits() -> None:
    estimates = believed([BEST] * 3, 0.03, [1.0, 0.5, 0.3])
    assert is_promising(estimates) == [True, True, False]


def test_a_great_gain_is_worth_a_risk() -> None:
    assert is_promising(believed([2 * BEST], 0.05, [0.2])) == [True]
    assert is_promising(believed([2 * BEST], 0.05, [0.02])) == [False]


@pytest.mark.parametrize("fits", [0.0, 0.01])
def test_a_candidate_that_cannot_fit_is_given_up_at_any_speed(fits: float) -> None:
    assert is_promising(believed([math.e * BEST], 0.5, [fits])) == [False]


def test_a_common_uncertainty_makes_neither_candidate_faster() -> None:
    estimates = believed([BEST], 0.005, [1.0], in_common=0.2)
    assert is_promising(estimates) == [False]
    assert is_promising(believed([BEST], 0.2, [1.0])) == [True]

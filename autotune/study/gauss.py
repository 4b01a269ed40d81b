"""The few figures of a normal distribution that beliefs are put in."""

from __future__ import annotations

import math

import numpy as np

from autotune.study.table import Numbers

WIDTH = 1.64
"""An interval's bounds lie so many standard deviations from its value: one truth in ten lies outside."""

_erf = np.vectorize(math.erf, otypes=[float])


def below(numbers: Numbers) -> Numbers:
    """The share of a normal distribution below so many deviations."""
    return np.asarray(0.5 * (1 + _erf(numbers / math.sqrt(2))))


def expected_gain(mean: Numbers, deviation: Numbers, best: float) -> Numbers:
    """By how much a value is expected to exceed the best, counting only where it does."""
    apart = (mean - best) / deviation
    density = np.exp(-0.5 * apart**2) / math.sqrt(2 * math.pi)
    return np.asarray((mean - best) * below(apart) + deviation * density)

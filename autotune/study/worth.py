"""Which candidate to measure next: the one that promises the most for each second that measuring it takes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from autotune.recommendation import Trial
from autotune.study.beliefs import Beliefs
from autotune.study.costs import seconds_to_measure
from autotune.study.gauss import below, expected_gain
from autotune.study.options import SearchOptions
from autotune.study.table import Flags, Numbers, Places, Table

GAIN = 0.02
"""Less than this is no improvement."""

LIKELY = 0.1
"""A candidate that fits and is an improvement with less than this chance is given up."""

CAUTION = (1.5, 3.0, 5.0)
"""An out-of-memory error costs more than its seconds: the chance of fitting counts by this power, before the first, after one,
and after more. The first is the price of knowing where the limit lies."""

THRIFT = 0.5
"""How much seconds count: at 1 a cheap small step would always come before a dear one that may bring much."""


def worth(
    table: Table,
    trials: Sequence[Trial],
    beliefs: Beliefs,
    pool: Places,
    leader: int | None,
    options: SearchOptions,
    live: Collection[str] = (),
) -> Numbers:
    """Of each member of the pool, in its order. Without a leader to beat, any that fits is a gain."""
    caution = CAUTION[min(len(CAUTION) - 1, sum(one.measurement.outcome.is_out_of_memory for one in trials))]
    if leader is None:
        mean = beliefs.speed.mean[pool]
        gain = expected_gain(mean, beliefs.speed.deviation[pool], float(np.max(mean)) - 1.0) * beliefs.fits[pool] ** caution
    else:
        ahead, doubt = beliefs.speed.ahead_of(leader)
        gain = expected_gain(ahead[pool], doubt[pool], 0.0) * beliefs.fits[pool] ** caution
    if not options.value_per_second:
        return gain
    return np.asarray(gain / seconds_to_measure(table, trials, beliefs, live)[pool] ** THRIFT)


def promising(beliefs: Beliefs, pool: Places, leader: int) -> Flags:
    """Members of the pool that may fit and be better than the leader by more than what counts: the upper bound of what is a
    gamble on both lies lower than that of what surely fits. What the two have in common cancels, known or not."""
    ahead, doubt = beliefs.speed.ahead_of(leader)
    chance = beliefs.fits[pool] * below((ahead[pool] - math.log1p(GAIN)) / doubt[pool])
    return np.asarray(chance >= LIKELY)

"""Which candidate to measure next: the one that promises the most for each second that measuring it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autotune.recommendation import Trial
from autotune.study.beliefs import Beliefs, expected_gain
from autotune.study.costs import seconds_to_measure
from autotune.study.options import SearchOptions
from autotune.study.table import Flags, Numbers, Places, Table

GAIN = 0.02
"""Less than this is no improvement."""

SURE = 1.3
"""How many standard deviations above what is believed a candidate's speed is reckoned with before it is given up."""

SURE_OF_THE_UNTRIED = 2.2
"""The same for what has a switch in a position in which nothing was measured yet: of that, little is known by neighbours."""

CAUTION = 4.0
"""An out-of-memory error costs more than its seconds: the chance of fitting counts by this power."""

THRIFT = 0.5
"""How much seconds count: at 1 a cheap small step would always come before a dear one that may bring much."""

UNLIKELY = 0.1
"""What fits with less than this chance is no reason to go on."""


def worth(
    table: Table, trials: Sequence[Trial], beliefs: Beliefs, pool: Places, best: float | None, options: SearchOptions
) -> Numbers:
    """Of each member of the pool, in its order. Without a best to beat, any that fits is a gain."""
    mean, deviation = beliefs.speed.mean[pool], beliefs.speed.deviation[pool]
    level = math.log(best) if best else float(np.max(mean)) - 1.0
    gain = expected_gain(mean, deviation, level) * beliefs.fits[pool] ** (CAUTION if best else 2 * CAUTION)
    if not options.value_per_second:
        return gain
    return np.asarray(gain / seconds_to_measure(table, trials, beliefs)[pool] ** THRIFT)


def promising(beliefs: Beliefs, pool: Places, best: float, untried: Flags) -> Flags:
    """Members of the pool that may be better than the best by more than what counts."""
    sure = np.where(untried[pool], SURE_OF_THE_UNTRIED, SURE)
    upper = beliefs.speed.mean[pool] + sure * beliefs.speed.deviation[pool]
    return np.asarray((upper > math.log(best * (1 + GAIN))) & (beliefs.fits[pool] >= UNLIKELY))

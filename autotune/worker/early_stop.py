"""Early stop of a candidate that can no longer become the best, judged by its timed cycles.

A disturbance only slows a cycle down, so the fastest cycle so far is decisive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Upper bound of a candidate's speed: this many standard errors above the fastest cycle.
MARGIN_STANDARD_ERRORS = 2.0
SINGLE_CYCLE_FACTOR = 2.0  # slowdown by a disturbance that a single cycle may have


def out_of_reach(rates: Sequence[float], *, goal: float, spread: float) -> bool:
    """Return True if the upper bound of these cycles' tokens per second is below the goal.

    `spread` is the usual standard deviation of a cycle's log rate on this machine; a larger one of
    these cycles replaces it.
    """
    if not rates or min(rates) <= 0 or goal <= 0:
        return False
    if len(rates) == 1:
        return rates[0] * SINGLE_CYCLE_FACTOR < goal
    # upper bound = max(log r) + z * max(spread, s) / sqrt(n);  s: standard deviation of log r, n:
    # number of cycles
    logs = [math.log(rate) for rate in rates]
    mean = sum(logs) / len(logs)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in logs) / (len(logs) - 1))
    return max(logs) + MARGIN_STANDARD_ERRORS * max(spread, deviation) / math.sqrt(len(logs)) < math.log(goal)

"""Whether a candidate that is being timed can still become the best, given its cycles so far and how much they scatter.

A hiccup only ever slows a cycle down, so the fastest cycle so far is what a candidate is judged by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SURE = 2.0
"""Standard errors above the fastest cycle: beyond this a candidate is not believed to be any faster."""

HICCUP = 2.0
"""A single cycle may take so many times as long as usual: it alone condemns only what is slower still."""


def out_of_reach(rates: Sequence[float], *, goal: float, spread: float) -> bool:
    """Whether even the upper bound of what these cycles' tokens per second say stays below the goal.

    `spread` is how much single cycles scatter on this machine, as a share; where these scatter more, that counts.
    """
    if not rates or min(rates) <= 0 or goal <= 0:
        return False
    if len(rates) == 1:
        return rates[0] * HICCUP < goal
    logs = [math.log(rate) for rate in rates]
    mean = sum(logs) / len(logs)
    here = math.sqrt(sum((one - mean) ** 2 for one in logs) / (len(logs) - 1))
    return max(logs) + SURE * max(spread, here) / math.sqrt(len(logs)) < math.log(goal)

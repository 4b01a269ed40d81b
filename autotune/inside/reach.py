"""Whether a candidate that is being timed can still become the best, given its cycles so far and how much they scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence

SURE = 2.0
"""Standard errors above the cycles' mean: beyond this a candidate is not believed to be any faster."""


def out_of_reach(rates: Sequence[float], *, goal: float, spread: float) -> bool:
    """Whether even the upper bound of what these cycles' tokens per second say stays below the goal.

    `spread` is how much single cycles scatter on this machine, as a share; where these scatter more, that counts.
    """
    if not rates or min(rates) <= 0 or goal <= 0:
        return False
    logs = [math.log(rate) for rate in rates]
    mean = sum(logs) / len(logs)
    here = math.sqrt(sum((one - mean) ** 2 for one in logs) / (len(logs) - 1)) if len(logs) > 1 else 0.0
    return mean + SURE * max(spread, here) / math.sqrt(len(logs)) < math.log(goal)

"""Which of a longer model's allocations are the short one's, and which there are more of.

Both are in the order in which they were made. None is missing in the longer one; some are larger there (a list that is put
together over all parameters), and what there are more of comes in as few runs as can be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.predict.pieces.blocks import Integers, NotUniform

What = tuple[int, int]
"""An allocation's size and what it is."""

GROWN = 1000
"""What taking a larger one for it costs, in runs: nobody has so many."""

NEVER = 10**9


def aligned(ours: Sequence[What], theirs: Sequence[What]) -> list[int]:
    """Of each of ours, its place among theirs. NotUniform where one of ours is not there."""
    more = len(theirs) - len(ours)
    if more < 0:
        raise NotUniform("the longer model lacks what the short one has")
    costs = _costs(ours, theirs, more)
    # Of i of ours with d more before them: the least cost, where the last was one of ours, and where it was one more.
    taken, put_in = (np.full((len(ours) + 1, more + 1), NEVER, dtype=np.int64) for _ in range(2))
    taken[0, 0] = 0
    for i in range(len(ours) + 1):
        if i:
            taken[i] = np.minimum(np.minimum(taken[i - 1], put_in[i - 1]) + costs[i - 1], NEVER)
        # A run that goes on costs nothing: its least cost is that of the cheapest place at which it may have begun.
        put_in[i, 1:] = np.minimum.accumulate(taken[i, :-1] + 1) if more else put_in[i, 1:]
    if min(taken[-1, more], put_in[-1, more]) >= NEVER:
        raise NotUniform("the longer model's allocations are others")
    return _places(taken, put_in)


def _costs(ours: Sequence[What], theirs: Sequence[What], more: int) -> Integers:
    """Of taking, for each of ours, the one that stands so many places further among theirs."""
    one, other = (np.array(several, dtype=np.int64).reshape(-1, 2) for several in (ours, theirs))
    beside = np.arange(len(ours))[:, None] + np.arange(more + 1)[None, :]
    larger = other[beside, 0] - one[:, :1]
    found = np.where(larger == 0, 0, np.where(larger > 0, GROWN, NEVER))
    costs: Integers = np.where(other[beside, 1] == one[:, 1:], found, NEVER)
    return costs


def _places(taken: Integers, put_in: Integers) -> list[int]:
    """Back from the end."""
    i, d = len(taken) - 1, taken.shape[1] - 1
    places: list[int] = []
    while i or d:
        if put_in[i, d] < taken[i, d]:  # the run that ends here: back to where it began
            d = next(start for start in range(d - 1, -1, -1) if taken[i, start] + 1 == put_in[i, d])
            if not i:
                break
        places.append(i - 1 + d)
        i -= 1
    return places[::-1]

"""Alignment of a short model's allocations with those of a longer model.

Both are in allocation order. Each short allocation has a match in the longer model, of equal or
larger size (a list over all parameters grows). The additional allocations form as few runs as
possible.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.estimate.screening.blocks import Integers, NotUniform

SizeAndPart = tuple[int, int]

LARGER_COST = 1000  # cost of a match with a larger allocation, in runs: no trace has as many runs
NO_MATCH_COST = 10**9


def aligned(ours: Sequence[SizeAndPart], theirs: Sequence[SizeAndPart]) -> list[int]:
    """Return the place of each of `ours` in `theirs`. NotUniform if one has no match."""
    more = len(theirs) - len(ours)
    if more < 0:
        raise NotUniform("the longer model lacks an allocation of the short one")
    # costs[i, d]: of matching ours[i] with theirs[i + d].
    one, other = (np.array(several, dtype=np.int64).reshape(-1, 2) for several in (ours, theirs))
    places = np.arange(len(ours))[:, None] + np.arange(more + 1)[None, :]
    larger = other[places, 0] - one[:, :1]
    by_size = np.where(larger == 0, 0, np.where(larger > 0, LARGER_COST, NO_MATCH_COST))
    costs = np.where(other[places, 1] == one[:, 1:], by_size, NO_MATCH_COST)
    # matched[i, d], added[i, d]: least cost of i of ours with d additions, by the kind of the last.
    matched, added = (np.full((len(ours) + 1, more + 1), NO_MATCH_COST, dtype=np.int64) for _ in range(2))
    matched[0, 0] = 0
    for i in range(len(ours) + 1):
        if i:
            matched[i] = np.minimum(np.minimum(matched[i - 1], added[i - 1]) + costs[i - 1], NO_MATCH_COST)
        # Only the begin of a run costs: take the cheapest place where it may have begun.
        added[i, 1:] = np.minimum.accumulate(matched[i, :-1] + 1) if more else added[i, 1:]
    if min(matched[-1, more], added[-1, more]) >= NO_MATCH_COST:
        raise NotUniform("the longer model's allocations differ in kind")
    return _places(matched, added)


def _places(matched: Integers, added: Integers) -> list[int]:
    """Trace the cheapest path back from the end."""
    i, d = len(matched) - 1, matched.shape[1] - 1
    places: list[int] = []
    while i or d:
        if added[i, d] < matched[i, d]:  # a run of additions ends here: go back to its begin
            d = next(start for start in range(d - 1, -1, -1) if matched[i, start] + 1 == added[i, d])
            if not i:
                break
        places.append(i - 1 + d)
        i -= 1
    return places[::-1]

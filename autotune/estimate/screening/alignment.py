"""Alignment of a short model's allocations with those of a longer model, outside the layers.

Let u_1 ... u_n be the short model's allocations in a block, and v_1 ... v_m the longer model's,
m >= n, each a size with a part. Wanted are places j(1) < ... < j(n) such that v_j(i) matches u_i:
the same part, and an equal or larger size. A list over all parameters grows with the layers: from
L0 to L0 + p of them, by at most p / L0 of its size. The other m - n allocations are those of one
more group of layers. They are expected in few runs: an optimizer makes its states layer after
layer.

    d            number of additional allocations so far, so that j(i) = i + d
    cost(i, d)   0 if v_(i+d) has the size of u_i, LARGER_COST if it is larger by at most p / L0,
                 else NO_MATCH_COST
    match(i, d)  least cost of u_1 ... u_i with d additional allocations, the last one matched
    added(i, d)  the same, the last one additional

    match(i, d) = min(match(i-1, d), added(i-1, d)) + cost(i, d)
    added(i, d) = 1 + min over d' < d of match(i, d')            a run costs 1, whatever its length
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.estimate.screening.points import Integers, NotUniform
from autotune.estimate.screening.repetition import LayerRepetition

SizeAndPart = tuple[int, int]

LARGER_COST = 1000  # cost of a match with a larger list, in runs: no trace has as many runs
NO_MATCH_COST = 10**9


def aligned(
    short: Sequence[SizeAndPart],
    longer: Sequence[SizeAndPart],
    repetition: LayerRepetition,
) -> list[int]:
    """Return j(i), counted from 0. NotUniform if an allocation has no match."""
    if len(longer) < len(short):
        raise NotUniform("the longer model lacks an allocation of the short one")
    match, added = _least_costs(_match_costs(short, longer, repetition))
    least_cost = min(match[-1, -1], added[-1, -1])
    if least_cost >= NO_MATCH_COST:
        raise NotUniform("the longer model's allocations differ in kind")
    return _cheapest_places(match, added)


def _match_costs(
    short: Sequence[SizeAndPart],
    longer: Sequence[SizeAndPart],
    repetition: LayerRepetition,
) -> Integers:
    """Return cost(i, d)."""
    short_sizes, short_parts = _columns(short)
    longer_sizes, longer_parts = _columns(longer)
    i = np.arange(len(short))[:, np.newaxis]
    d = np.arange(len(longer) - len(short) + 1)

    growth = longer_sizes[i + d] - short_sizes[i]
    grows_like_list = growth * repetition.layers <= short_sizes[i] * repetition.period
    same_part = longer_parts[i + d] == short_parts[i]
    costs = np.full(growth.shape, NO_MATCH_COST)
    costs[same_part & (growth > 0) & grows_like_list] = LARGER_COST
    costs[same_part & (growth == 0)] = 0
    return costs


def _columns(allocations: Sequence[SizeAndPart]) -> Integers:
    """Return the sizes and the parts."""
    return np.array(allocations, dtype=np.int64).reshape(-1, 2).T


def _least_costs(costs: Integers) -> tuple[Integers, Integers]:
    """Return match(i, d) and added(i, d), with a row for i = 0."""
    count, width = costs.shape
    match = np.full((count + 1, width), NO_MATCH_COST)
    added = match.copy()
    match[0, 0] = 0
    added[0, 1:] = 1
    for i in range(1, count + 1):
        before = np.minimum(match[i - 1], added[i - 1])
        match[i] = before + costs[i - 1]
        added[i, 1:] = 1 + np.minimum.accumulate(match[i, :-1])
    return match, added


def _cheapest_places(match: Integers, added: Integers) -> list[int]:
    """Follow the least costs back from the end: j(n) first."""
    places: list[int] = []
    d = match.shape[1] - 1
    for i in range(len(match) - 1, 0, -1):
        if added[i, d] < match[i, d]:
            d = _begin_of_run(match[i, :d], added[i, d])
        places.append(i - 1 + d)
    return places[::-1]


def _begin_of_run(match: Integers, cost: int) -> int:
    """Return the last d' at which a run of additional allocations begins that costs this much."""
    (begins,) = np.nonzero(match + 1 == cost)
    return int(begins[-1])

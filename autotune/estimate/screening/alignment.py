"""Alignment of a short model's allocations with those of a longer model, outside the layers.

Let u_1 ... u_n be the short model's allocations in a block, and v_1 ... v_m the longer model's,
m >= n, each a size with a part. Wanted are places j(1) < ... < j(n) such that v_j(i) matches u_i:
the same part, and an equal or larger size (a list over all parameters grows with the layers). The
other m - n allocations are those of one more group of layers. They are expected in few runs: an
optimizer makes its states layer after layer.

    d            number of additional allocations so far, so that j(i) = i + d
    cost(i, d)   0 if v_(i+d) has the size of u_i, LARGER_COST if it is larger, else NO_MATCH_COST
    match(i, d)  least cost of u_1 ... u_i with d additional allocations, the last one matched
    added(i, d)  the same, the last one additional

    match(i, d) = min(match(i-1, d), added(i-1, d)) + cost(i, d)
    added(i, d) = 1 + min over d' < d of match(i, d')            a run costs 1, whatever its length
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.estimate.screening.points import Integers, NotUniform

SizeAndPart = tuple[int, int]

LARGER_COST = 1000  # cost of a match with a larger allocation, in runs: no trace has as many runs
NO_MATCH_COST = 10**9


def aligned(short: Sequence[SizeAndPart], longer: Sequence[SizeAndPart]) -> list[int]:
    """Return the place of each short allocation among the longer model's. NotUniform if one has
    no match.
    """
    additional = len(longer) - len(short)
    if additional < 0:
        raise NotUniform("the longer model lacks an allocation of the short one")
    match, added = _least_costs(_match_costs(short, longer))
    if min(match[-1, -1], added[-1, -1]) >= NO_MATCH_COST:
        raise NotUniform("the longer model's allocations differ in kind")
    return _cheapest_places(match, added)


def _match_costs(short: Sequence[SizeAndPart], longer: Sequence[SizeAndPart]) -> Integers:
    """Return cost(i, d)."""
    short_sizes, short_parts = np.array(short, dtype=np.int64).reshape(-1, 2).T
    longer_sizes, longer_parts = np.array(longer, dtype=np.int64).reshape(-1, 2).T
    additional = len(longer) - len(short)
    places = np.arange(len(short))[:, None] + np.arange(additional + 1)[None, :]

    growth = longer_sizes[places] - short_sizes[:, None]
    costs = np.where(growth == 0, 0, np.where(growth > 0, LARGER_COST, NO_MATCH_COST))
    return np.where(longer_parts[places] == short_parts[:, None], costs, NO_MATCH_COST)


def _least_costs(costs: Integers) -> tuple[Integers, Integers]:
    """Return match(i, d) and added(i, d), with a row for i = 0."""
    count, width = costs.shape
    match = np.full((count + 1, width), NO_MATCH_COST, dtype=np.int64)
    added = match.copy()
    match[0, 0] = 0
    for i in range(count + 1):
        if i:
            before = np.minimum(match[i - 1], added[i - 1])
            match[i] = np.minimum(before + costs[i - 1], NO_MATCH_COST)
        added[i, 1:] = np.minimum.accumulate(match[i, :-1] + 1)
    return match, added


def _cheapest_places(match: Integers, added: Integers) -> list[int]:
    """Trace the cheapest path back from the end."""
    i, d = len(match) - 1, match.shape[1] - 1
    places: list[int] = []
    while i or d:
        if added[i, d] < match[i, d]:  # a run of additional allocations ends: go to its begin
            begin = d - 1
            while match[i, begin] + 1 != added[i, d]:
                begin -= 1
            d = begin
        if i:
            places.append(i - 1 + d)
            i -= 1
    return places[::-1]

"""How a machine's GPUs and cores are shared out among slots: disjoint, and each slot's own near to each other. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from typing import TypeVar

Thing = TypeVar("Thing")

FAR = 100
"""Stands for a distance that nobody tells: beyond all that are."""

WIDEST_SEARCH = 5000
"""So many ways to fill up one group are looked at; beyond, the nearest of each are taken."""


def groups_of(things: Sequence[Thing], size: int, distance: Callable[[Thing, Thing], int | None]) -> list[tuple[Thing, ...]]:
    """As many groups of this size as there are, the members of each as near to each other as can be.

    One group after another takes the nearest company for the first that is left: on a machine of NVLink pairs
    or of two sockets that is the best there is.
    """
    left, groups = list(things), []
    while len(left) >= size:
        first, *others = left
        group = (first, *_company(first, others, size - 1, distance))
        groups.append(group)
        left = [one for one in left if one not in group]
    return groups


def _company(
    first: Thing, others: Sequence[Thing], count: int, distance: Callable[[Thing, Thing], int | None]
) -> tuple[Thing, ...]:
    def apart(one: Thing, other: Thing) -> int:
        told = distance(one, other)
        return FAR if told is None else told

    def spread(company: Collection[Thing]) -> int:
        return sum(apart(one, other) for one, other in combinations((first, *company), 2))

    ways = combinations(others, count)
    found = [company for _, company in zip(range(WIDEST_SEARCH + 1), ways, strict=False)]
    if len(found) > WIDEST_SEARCH:
        return tuple(sorted(others, key=lambda other: apart(first, other))[:count])
    return min(found, key=spread)


def shares_of(cores: Sequence[int], slots: int) -> list[frozenset[int]]:
    """The cores in this order cut into as many pieces, none more than one larger than another."""
    whole, more = divmod(len(cores), slots)
    shares, start = [], 0
    for number in range(slots):
        end = start + whole + (number < more)
        shares.append(frozenset(cores[start:end]))
        start = end
    return shares


def listed(cores: Collection[int]) -> str:
    """`0-3, 8`, for people."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

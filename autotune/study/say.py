"""Which knobs have a say in a figure: what moves it in no prediction has hardly any in how far the predictions are off.

An engine's share of the memory does nothing to a backward pass, and nothing to the rollout either once its cache is large enough.
Two candidates that differ in nothing else are then off by the same, and measuring one of them tells of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.study.table import Numbers, Places, Table

FULL = 0.05
"""A knob whose positions lie so far apart on average, as a share of the figure, has its whole say."""

LEAST = 0.1
"""What is left to a position that moves no prediction: it may be the prediction that lacks it. Where none at all moves it, the
prediction is no guide, and all have the same say."""

SAME = 1e-3
"""Predictions that are nearer to each other than this, as a share, are one."""


@dataclass(frozen=True)
class Say:
    """One column of the table, numeric or by name, and what it does to one figure."""

    true: Numbers
    told: Numbers
    """The same, with one position for all that are predicted alike beside the same others."""

    trust: float
    """How far what is predicted is to be believed in this."""

    whole: float
    """Of the column, up to 1."""

    of_load: bool
    """Whether all candidates of one load have the same."""


def says(table: Table, figures: Numbers | None) -> tuple[list[Say], list[Say]]:
    """Of numeric features and of categories; `figures` are the logarithms of what is predicted, None where nothing is."""
    columns = [column for part in table.features for column in part.T.astype(float)]
    of_load = [bool(flag) for part in table.decided_by_load for flag in part]
    if figures is None:
        found = [Say(column, column, 1.0, 1.0, load) for column, load in zip(columns, of_load, strict=True)]
    else:
        shares, divides = _shares(columns, table.kinds.argmax(axis=1), figures)
        trust = (1 - LEAST) * max((share for share, one in zip(shares, divides, strict=True) if not one), default=1.0)
        wholes = [max(share, 1 - trust) for share in shares]
        told = _told(columns, figures)
        found = [Say(*one) for one in zip(columns, told, [trust] * len(columns), wholes, of_load, strict=True)]
    count = table.features[0].shape[1]
    return found[:count], found[count:]


def _shares(columns: list[Numbers], kinds: Places, figures: Numbers) -> tuple[list[float], list[bool]]:
    """Of each column, from 0 to 1, how far it moves the figure, and whether it is one that says which others apply. That is held
    against all candidates, every other one among those with the same knobs."""
    codes = [_places(column) for column in columns]
    divides = [all(len(np.unique(code[kinds == kind])) == 1 for kind in np.unique(kinds)) for code in codes]
    groups = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    shares = []
    for code, divider in zip(codes, divides, strict=True):
        among = [np.arange(len(kinds))] if divider else groups
        variance = sum(len(group) * _between(code[group], figures[group]) for group in among) / len(kinds)
        shares.append(min(1.0, float(np.sqrt(variance)) / FULL))
    return shares, divides


def _told(columns: list[Numbers], figures: Numbers) -> list[Numbers]:
    """Each column with the lowest of the positions that make no difference beside the same others."""
    dice, codes = np.random.default_rng(0), [_places(column) for column in columns]
    # A row's number is the sum of its positions' random ones, so that leaving out a column is a subtraction.
    numbers = [dice.integers(2**62, size=code.max() + 1, dtype=np.int64)[code] for code in codes]
    figure = _places(np.round(figures / SAME))
    row = np.sum(numbers, axis=0) + dice.integers(2**62, size=figure.max() + 1, dtype=np.int64)[figure]
    found = []
    for column, code in zip(columns, codes, strict=True):
        tied = [number for number, other in zip(numbers, codes, strict=True) if _are_one(code, other)]
        groups = _places(row - np.sum(tied, axis=0))
        lowest = np.full(groups.max() + 1, np.inf)
        np.minimum.at(lowest, groups, column)
        found.append(lowest[groups])
    return found


def _are_one(left: Places, right: Places) -> bool:
    """Whether each follows from the other, as accumulation does from the micro-batch."""
    pairs = len(np.unique(left * (right.max() + 1) + right))
    return bool(pairs == left.max() + 1 == right.max() + 1)


def _between(positions: Places, figures: Numbers) -> float:
    """The variance of the positions' means."""
    _, places, counts = np.unique(positions, return_inverse=True, return_counts=True)
    means = np.bincount(places, weights=figures) / counts
    return float(np.average((means - figures.mean()) ** 2, weights=counts))


def _places(column: Numbers) -> Places:
    return np.asarray(np.unique(column, return_inverse=True)[1], dtype=np.int64)

"""Effect of each knob on a predicted figure, as weights for the surrogate's kernels.

A knob that changes no prediction hardly affects the prediction error either: an engine's share of
the memory does not affect a backward pass. Candidates that differ only in such knobs share their
error, so one measurement informs both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.search.surrogate.candidate_table import CandidateTable, FloatArray, IndexArray

FULL_EFFECT = 0.05  # Standard deviation of a knob's mean figures, as a share, from which the knob has its full weight
# Weight of a knob that changes no prediction, since the prediction may lack it. If no knob changes any prediction, the
# predictions carry no information and all knobs have the same weight.
MIN_WEIGHT = 0.1
EQUAL_SHARE = 1e-3  # Predictions that differ by less than this share count as equal


@dataclass(frozen=True)
class KnobEffect:
    """One numeric or categorical column of the table and its effect on one figure."""

    actual: FloatArray
    predicted: FloatArray  # The column, with one position for all values that are predicted equal beside equal other knobs
    trust: float  # Weight of `predicted` against `actual`
    weight: float  # Weight of the column, up to 1
    of_load: bool  # True if all candidates of one load have the same value


def knob_effects(table: CandidateTable, figures: FloatArray | None) -> tuple[list[KnobEffect], list[KnobEffect]]:
    """Return the effects of numeric and of categorical columns; `figures`: logarithms of the predictions, if any."""
    columns = [column for part in table.features for column in part.T.astype(float)]
    of_load = [bool(flag) for part in table.decided_by_load for flag in part]
    if figures is None:
        found = [KnobEffect(column, column, 1.0, 1.0, load) for column, load in zip(columns, of_load, strict=True)]
    else:
        shares, divides = _effect_sizes(columns, table.kinds.argmax(axis=1), figures)
        trust = (1 - MIN_WEIGHT) * max((share for share, one in zip(shares, divides, strict=True) if not one), default=1.0)
        weights = [max(share, 1 - trust) for share in shares]
        predicted = _merge_equal_positions(columns, figures)
        found = [KnobEffect(*one) for one in zip(columns, predicted, [trust] * len(columns), weights, of_load, strict=True)]
    count = table.features[0].shape[1]
    return found[:count], found[count:]


def _effect_sizes(columns: list[FloatArray], kinds: IndexArray, figures: FloatArray) -> tuple[list[float], list[bool]]:
    """Return each column's effect from 0 to 1, and True for columns that determine which other knobs apply. Such a column is
    evaluated over all candidates, any other one within the candidates with the same knobs."""
    codes = [_codes(column) for column in columns]
    divides = [all(len(np.unique(code[kinds == kind])) == 1 for kind in np.unique(kinds)) for code in codes]
    groups = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    shares = []
    for code, divider in zip(codes, divides, strict=True):
        among = [np.arange(len(kinds))] if divider else groups
        variance = sum(len(group) * _variance_of_means(code[group], figures[group]) for group in among) / len(kinds)
        shares.append(min(1.0, float(np.sqrt(variance)) / FULL_EFFECT))
    return shares, divides


def _merge_equal_positions(columns: list[FloatArray], figures: FloatArray) -> list[FloatArray]:
    """Return each column with the lowest of the positions that leave the figure equal beside equal other knobs."""
    dice, codes = np.random.default_rng(0), [_codes(column) for column in columns]
    # A row's hash is the sum of its positions' random numbers, so that leaving out a column is a subtraction.
    hashes = [dice.integers(2**62, size=code.max() + 1, dtype=np.int64)[code] for code in codes]
    figure = _codes(np.round(figures / EQUAL_SHARE))
    row = np.sum(hashes, axis=0) + dice.integers(2**62, size=figure.max() + 1, dtype=np.int64)[figure]
    found = []
    for column, code in zip(columns, codes, strict=True):
        tied = [number for number, other in zip(hashes, codes, strict=True) if _determine_each_other(code, other)]
        groups = _codes(row - np.sum(tied, axis=0))
        lowest = np.full(groups.max() + 1, np.inf)
        np.minimum.at(lowest, groups, column)
        found.append(lowest[groups])
    return found


def _determine_each_other(left: IndexArray, right: IndexArray) -> bool:
    """True for a bijection, like that between accumulation and micro-batch at a fixed global batch."""
    pairs = len(np.unique(left * (right.max() + 1) + right))
    return bool(pairs == left.max() + 1 == right.max() + 1)


def _variance_of_means(positions: IndexArray, figures: FloatArray) -> float:
    """Variance between the positions' mean figures, weighted by their counts."""
    _, codes, counts = np.unique(positions, return_inverse=True, return_counts=True)
    means = np.bincount(codes, weights=figures) / counts
    return float(np.average((means - figures.mean()) ** 2, weights=counts))


def _codes(column: FloatArray) -> IndexArray:
    return np.asarray(np.unique(column, return_inverse=True)[1], dtype=np.int64)

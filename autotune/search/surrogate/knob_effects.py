"""Effect of each knob on a predicted figure, as weights for the surrogate's similarities.

A knob that changes no prediction hardly affects the prediction error either: an engine's share of
the memory does not affect a backward pass. Candidates that differ only in such knobs share their
error, so one measurement informs both.

Notation, for one figure (seconds of a phase, peak of a stretch) and one column of the table:

    f         logarithm of the predicted figure, by row
    kind      set of knobs that apply to a row
    m(x)      mean of f over the rows with value x in this column, within one kind
    share     min(1, standard deviation of m / FULL_EFFECT): effect of this column, 0 to 1
    trust     (1 - MIN_WEIGHT) · largest share of any column: how much the predictions tell
    weight    max(share, 1 - trust)

If no column has an effect, the predictions carry no information: trust is 0, and all weights are 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.search.surrogate.candidate_table import CandidateTable, FloatArray, IndexArray

# Standard deviation of a knob's mean figures, as a share, from which the knob has its full weight
FULL_EFFECT = 0.05
# Weight of a knob that changes no prediction, since the prediction may lack it
MIN_WEIGHT = 0.1
EQUAL_SHARE = 1e-3  # Predictions that differ by less than this share count as equal


@dataclass(frozen=True, kw_only=True)
class KnobEffect:
    """One numeric or categorical column of the table, and its effect on one figure."""

    actual: FloatArray  # The column
    # The column with one position for all values that are predicted equal if all else is equal
    predicted: FloatArray
    trust: float  # Weight of `predicted` against `actual`
    weight: float  # Weight of the column, up to 1
    of_load: bool  # True if all candidates of one load have the same value


def knob_effects(
    table: CandidateTable, figures: FloatArray | None
) -> tuple[list[KnobEffect], list[KnobEffect]]:
    """Return the effects of numeric and of categorical columns; `figures`: logarithms of the
    predictions, if any.
    """
    numeric, categorical = table.features
    codes = categorical.T.astype(float)
    columns = [*numeric.T, *codes]
    of_load = np.concatenate(table.decided_by_load)
    trust = 1.0
    weights = [1.0] * len(columns)
    predicted = columns
    if figures is not None:
        kinds = table.kinds.argmax(axis=1)
        trust, weights = _trust_and_weights(columns, kinds, figures)
        predicted = _merge_equal_positions(columns, figures)

    effects = []
    for number, column in enumerate(columns):
        effects.append(
            KnobEffect(
                actual=column,
                predicted=predicted[number],
                trust=trust,
                weight=weights[number],
                of_load=bool(of_load[number]),
            )
        )
    numeric_count = numeric.shape[1]
    return effects[:numeric_count], effects[numeric_count:]


def _trust_and_weights(
    columns: Sequence[FloatArray],
    kinds: IndexArray,
    figures: FloatArray,
) -> tuple[float, list[float]]:
    """Return the trust in the predictions and the weight of each column.

    A column that decides the kind is constant within each kind, so its share is computed over all
    rows. It does not count for the trust.
    """
    every_row = np.arange(len(kinds))
    rows_by_kind = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    shares = []
    shares_within_kinds = []
    for column in columns:
        codes = _codes(column)
        if _is_constant_within(rows_by_kind, codes):
            shares.append(_effect_share(codes, figures, [every_row]))
        else:
            share = _effect_share(codes, figures, rows_by_kind)
            shares.append(share)
            shares_within_kinds.append(share)
    trust = (1 - MIN_WEIGHT) * max(shares_within_kinds, default=1.0)
    weights = [max(share, 1 - trust) for share in shares]
    return trust, weights


def _is_constant_within(groups: Sequence[IndexArray], codes: IndexArray) -> bool:
    counts = [len(np.unique(codes[rows])) for rows in groups]
    return all(count == 1 for count in counts)


def _effect_share(
    codes: IndexArray,
    figures: FloatArray,
    groups: Sequence[IndexArray],
) -> float:
    """Return the column's effect within groups of rows, from 0 to 1."""
    variance = 0.0
    for rows in groups:
        group_variance = _variance_of_means(codes[rows], figures[rows])
        variance += len(rows) * group_variance
    deviation = float(np.sqrt(variance / len(figures)))
    return min(1.0, deviation / FULL_EFFECT)


def _variance_of_means(codes: IndexArray, figures: FloatArray) -> float:
    """Return the variance between the codes' mean figures, weighted by their counts."""
    _, places, counts = np.unique(codes, return_inverse=True, return_counts=True)
    means = np.bincount(places, weights=figures) / counts
    deviations = means - figures.mean()
    return float(np.average(deviations**2, weights=counts))


def _merge_equal_positions(columns: Sequence[FloatArray], figures: FloatArray) -> list[FloatArray]:
    """Return each column with the lowest of the positions that leave the figure equal if all other
    knobs are equal.

    Rows are compared by a hash: the sum of one random number per position of each column. Leaving
    out a column is then a subtraction.
    """
    random = np.random.default_rng(0)
    codes_by_column = [_codes(column) for column in columns]
    hashes = [_random_number_of(codes, random) for codes in codes_by_column]
    figure_codes = _codes(np.round(figures / EQUAL_SHARE))
    figure_hash = _random_number_of(figure_codes, random)
    row_hash = np.sum(hashes, axis=0) + figure_hash

    merged = []
    for column, codes in zip(columns, codes_by_column, strict=True):
        without_column = row_hash.copy()
        for other_codes, other_hash in zip(codes_by_column, hashes, strict=True):
            if _determine_each_other(codes, other_codes):
                without_column -= other_hash
        groups = _codes(without_column)
        lowest = np.full(groups.max() + 1, np.inf)
        np.minimum.at(lowest, groups, column)
        merged.append(lowest[groups])
    return merged


def _random_number_of(codes: IndexArray, random: np.random.Generator) -> IndexArray:
    """Return one random number for each code, by row."""
    count = codes.max() + 1
    numbers: IndexArray = random.integers(2**62, size=count, dtype=np.int64)
    return numbers[codes]


def _determine_each_other(codes: IndexArray, other_codes: IndexArray) -> bool:
    """Return True for a bijection, like that between accumulation and micro-batch at a fixed global
    batch. A column and itself are one.
    """
    count = codes.max() + 1
    other_count = other_codes.max() + 1
    pair_codes = codes * other_count + other_codes
    pairs = len(np.unique(pair_codes))
    return bool(pairs == count == other_count)


def _codes(column: FloatArray | IndexArray) -> IndexArray:
    """Return the position of each value among the distinct values of the column."""
    _, codes = np.unique(column, return_inverse=True)
    return np.asarray(codes, dtype=np.int64)

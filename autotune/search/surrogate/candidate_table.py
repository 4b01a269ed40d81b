"""Candidates as arrays, built once per study, so that a step over thousands of them is a few
comparisons; and the effect of each knob on a predicted figure, as weights for the surrogate's
kernels.

A knob that changes no prediction hardly affects the prediction error either: an engine's share of
the memory does not affect a backward pass. Candidates that differ only in such knobs share their
error, so one measurement informs both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autotune.core.space import Candidate, Knob, SearchSpace

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.int64]


class CandidateTable:
    """Candidates by row; all arrays here share the row order."""

    def __init__(self, space: SearchSpace, candidates: Iterable[Candidate]) -> None:
        self.space = space
        self.candidates: tuple[Candidate, ...] = tuple(dict.fromkeys(candidates))
        self.index = {candidate.id: row for row, candidate in enumerate(self.candidates)}
        self.load_number = {
            key: number
            for number, key in enumerate(dict.fromkeys(one.load_key for one in self.candidates))
        }
        self.loads: IndexArray = np.array(
            [self.load_number[one.load_key] for one in self.candidates], dtype=np.int64
        )
        self.load_examples = {
            self.load_number[one.load_key]: one for one in reversed(self.candidates)
        }
        """First candidate of each load."""

    def __len__(self) -> int:
        return len(self.candidates)

    def mask(self, ids: Iterable[str]) -> BoolArray:
        """Return True for these candidates; unknown ids are ignored."""
        found = np.zeros(len(self), dtype=bool)
        found[[self.index[name] for name in ids if name in self.index]] = True
        return found

    def indices(self, candidates: Iterable[Candidate]) -> IndexArray:
        return np.array([self.index[one.id] for one in candidates], dtype=np.int64)

    @cached_property
    def demands(self) -> FloatArray:
        """Columns by which memory demand is partially ordered: a >= b in all of them means that
        a needs at least b's memory.
        """
        return self._demand_columns(3)

    @cached_property
    def _categories(self) -> FloatArray:
        """Columns that are equal for candidates that differ only in knobs with an ordered effect
        on memory.
        """
        return self._demand_columns(1)

    def _demand_columns(self, most: int) -> FloatArray:
        """Stack the first columns of each knob that are not constant."""
        columns = [
            column
            for knob in self.space.knobs
            for column in _demand_columns(knob, self.candidates)[:most]
        ]
        moving = [values for values in columns if len(values) and (values != values[0]).any()]
        return np.column_stack(moving) if moving else np.zeros((len(self), 1))

    def demanding_at_least(self, index: int) -> BoolArray:
        """Return the candidates that need at least the memory of this one, itself included."""
        return np.asarray((self.demands >= self.demands[index]).all(axis=1))

    def demanding_at_most(self, index: int) -> BoolArray:
        """Return the candidates that need at most the memory of this one, itself included."""
        return np.asarray((self.demands <= self.demands[index]).all(axis=1))

    def demanding_at_least_any(self, mask: BoolArray) -> BoolArray:
        """Return the candidates that need at least the memory of any in `mask`."""
        rows = np.unique(self.demands[mask], axis=0)
        minimal = [row for row in rows if not _is_dominated(row, rows)]
        return np.asarray(np.any([(self.demands >= row).all(axis=1) for row in minimal], axis=0))

    def differing_in_batches(self, index: int) -> BoolArray:
        """Return the candidates with this one's load and categories: they differ in batch shape
        and recomputation alone.
        """
        return np.asarray(
            (self.loads == self.loads[index])
            & (self._categories == self._categories[index]).all(axis=1)
        )

    def least_demanding(self, indices: IndexArray) -> int:
        """Return the first of `indices` that no other one is below in memory demand."""
        rows, is_open = self.demands[indices], np.ones(len(indices), dtype=bool)
        for number, row in enumerate(rows):
            if is_open[number]:
                if not _is_dominated(row, rows):
                    return int(indices[number])
                is_open &= ~(rows >= row).all(
                    axis=1
                )  # no row above a dominated one is minimal either
        raise ValueError("least_demanding: no candidates. Pass at least one index.")

    @cached_property
    def features(self) -> tuple[FloatArray, IndexArray]:
        """Moving numeric knobs scaled to 0..1, and moving categorical knobs as codes."""
        numeric = [knob for knob in self._moving if _is_numeric(knob, self.candidates)]
        numbers = [
            _scaled([one.knobs.get(knob.name) for one in self.candidates]) for knob in numeric
        ]
        categories = [
            _coded([one.knobs.get(knob.name) for one in self.candidates])
            for knob in self._moving
            if knob not in numeric
        ]
        empty = np.zeros((len(self), 0))
        return np.column_stack(numbers or [empty]), np.column_stack(
            categories or [empty.astype(np.int64)]
        )

    @cached_property
    def decided_by_load(self) -> tuple[BoolArray, BoolArray]:
        """True for the numeric features, and for the categories, that are constant within every
        load.
        """
        firsts = np.zeros(len(self.load_number), dtype=np.int64)
        firsts[self.loads[::-1]] = np.arange(len(self))[::-1]
        numbers, categories = self.features
        first = firsts[self.loads]
        return (numbers == numbers[first]).all(axis=0), (categories == categories[first]).all(
            axis=0
        )

    @cached_property
    def kinds(self) -> FloatArray:
        """One-hot columns of the set of knobs that apply: a candidate with an engine has other
        knobs than one without.
        """
        names = [frozenset(one.knobs) for one in self.candidates]
        return np.array([[float(mine == kind) for kind in dict.fromkeys(names)] for mine in names])

    @cached_property
    def steps(self) -> FloatArray:
        """Doublings of declared memory consumers, centred; a switch counts as two."""
        found = np.zeros(len(self))
        for knob in self.space.knobs:
            if knob.memory in ("grows", "shrinks") and knob.effect == "neutral":
                values = [effective_value(knob, one) for one in self.candidates]
                found += _doublings(values) if knob.memory == "grows" else -_doublings(values)
        return np.asarray(found - found.mean())

    @cached_property
    def _moving(self) -> list[Knob]:
        return [
            knob
            for knob in self.space.knobs
            if len({one.knobs.get(knob.name) for one in self.candidates}) > 1
        ]


def _is_dominated(row: FloatArray, rows: FloatArray) -> bool:
    return bool(((rows <= row).all(axis=1) & (rows < row).any(axis=1)).any())


def _demand_columns(knob: Knob, candidates: Sequence[Candidate]) -> list[FloatArray]:
    """Columns whose order implies that of memory demand; unordered values are comparable only if
    equal.
    """
    if knob.memory == "none":
        return []
    kind, size = np.zeros(len(candidates)), np.zeros(len(candidates))
    kinds: dict[tuple[type, object], float] = {}
    for row, one in enumerate(candidates):
        value = effective_value(knob, one)
        if knob.memory != "unclear" and isinstance(value, (int, float)):
            size[row] = float(value) if knob.memory == "grows" else -float(value)
        else:
            kind[row] = kinds.setdefault((type(value), value), len(kinds) + 1.0)
    return [kind, -kind, size]


def effective_value(knob: Knob, candidate: Candidate) -> object:
    """Return the value that determines the knob's memory; None if it does not apply or is
    unknown.
    """
    if not knob.through:
        return candidate.knobs.get(knob.name)
    factors = [candidate.settings.get(name) for name in knob.through]
    return (
        math.prod(factor for factor in factors if isinstance(factor, int)) if all(factors) else None
    )


def _is_numeric(knob: Knob, candidates: Sequence[Candidate]) -> bool:
    """Return True for a scale: at least three numbers. A candidate without a value differs in
    another knob as well.
    """
    values = {one.knobs.get(knob.name) for one in candidates} - {None}
    return len(values) > 2 and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in values
    )


def _scaled(values: Sequence[object]) -> FloatArray:
    """Scale to 0..1, by logarithms if all are positive, so that each doubling is one equal step;
    no value: 0.5.
    """
    numbers = np.array([math.nan if value is None else value for value in values], dtype=float)
    known = numbers[~np.isnan(numbers)]
    spread = np.log(numbers) if (known > 0).all() else numbers
    least, most = np.nanmin(spread), np.nanmax(spread)
    return np.where(np.isnan(spread), 0.5, (spread - least) / (most - least))


def _doublings(values: Sequence[object]) -> FloatArray:
    """log2(value / smallest); 0 for a value that is no number, 2 for a switch."""
    if all(isinstance(value, bool) for value in values):
        return 2.0 * np.array(values, dtype=float)
    known = [float(value) for value in values if isinstance(value, (int, float)) and value > 0]
    if not known:
        return np.zeros(len(values))
    least = min(known)
    return np.array(
        [
            math.log2(value / least) if isinstance(value, (int, float)) and value > 0 else 0.0
            for value in values
        ]
    )


def _coded(values: Sequence[object]) -> IndexArray:
    codes: dict[tuple[type, object], int] = {}
    return np.array(
        [codes.setdefault((type(value), value), len(codes)) for value in values], dtype=np.int64
    )


# Standard deviation of a knob's mean figures, as a share, from which the knob has its full weight
FULL_EFFECT = 0.05
# Weight of a knob that changes no prediction, since the prediction may lack it. If no knob changes
# any prediction, the predictions carry no information and all knobs have the same weight.
MIN_WEIGHT = 0.1
EQUAL_SHARE = 1e-3  # Predictions that differ by less than this share count as equal


@dataclass(frozen=True)
class KnobEffect:
    """One numeric or categorical column of the table and its effect on one figure."""

    actual: FloatArray
    # The column, with one position for all values that are predicted equal beside equal other knobs
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
    columns = [column for part in table.features for column in part.T.astype(float)]
    of_load = [bool(flag) for part in table.decided_by_load for flag in part]
    if figures is None:
        found = [
            KnobEffect(column, column, 1.0, 1.0, load)
            for column, load in zip(columns, of_load, strict=True)
        ]
    else:
        shares, divides = _effect_sizes(columns, table.kinds.argmax(axis=1), figures)
        trust = (1 - MIN_WEIGHT) * max(
            (share for share, one in zip(shares, divides, strict=True) if not one), default=1.0
        )
        weights = [max(share, 1 - trust) for share in shares]
        predicted = _merge_equal_positions(columns, figures)
        found = [
            KnobEffect(*one)
            for one in zip(
                columns, predicted, [trust] * len(columns), weights, of_load, strict=True
            )
        ]
    count = table.features[0].shape[1]
    return found[:count], found[count:]


def _effect_sizes(
    columns: list[FloatArray], kinds: IndexArray, figures: FloatArray
) -> tuple[list[float], list[bool]]:
    """Return each column's effect from 0 to 1, and True for columns that determine which other
    knobs apply. Such a column is evaluated over all candidates, any other one within the
    candidates with the same knobs.
    """
    codes = [_codes(column) for column in columns]
    divides = [
        all(len(np.unique(code[kinds == kind])) == 1 for kind in np.unique(kinds)) for code in codes
    ]
    groups = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    shares = []
    for code, divider in zip(codes, divides, strict=True):
        among = [np.arange(len(kinds))] if divider else groups
        variance = sum(
            len(group) * _variance_of_means(code[group], figures[group]) for group in among
        ) / len(kinds)
        shares.append(min(1.0, float(np.sqrt(variance)) / FULL_EFFECT))
    return shares, divides


def _merge_equal_positions(columns: list[FloatArray], figures: FloatArray) -> list[FloatArray]:
    """Return each column with the lowest of the positions that leave the figure equal beside
    equal other knobs.
    """
    dice, codes = np.random.default_rng(0), [_codes(column) for column in columns]
    # A row's hash is the sum of its positions' random numbers, so that leaving out a column is a
    # subtraction.
    hashes = [dice.integers(2**62, size=code.max() + 1, dtype=np.int64)[code] for code in codes]
    figure = _codes(np.round(figures / EQUAL_SHARE))
    row = (
        np.sum(hashes, axis=0) + dice.integers(2**62, size=figure.max() + 1, dtype=np.int64)[figure]
    )
    found = []
    for column, code in zip(columns, codes, strict=True):
        tied = [
            number
            for number, other in zip(hashes, codes, strict=True)
            if _determine_each_other(code, other)
        ]
        groups = _codes(row - np.sum(tied, axis=0))
        lowest = np.full(groups.max() + 1, np.inf)
        np.minimum.at(lowest, groups, column)
        found.append(lowest[groups])
    return found


def _determine_each_other(left: IndexArray, right: IndexArray) -> bool:
    """True for a bijection, like that between accumulation and micro-batch at a fixed global
    batch.
    """
    pairs = len(np.unique(left * (right.max() + 1) + right))
    return bool(pairs == left.max() + 1 == right.max() + 1)


def _variance_of_means(positions: IndexArray, figures: FloatArray) -> float:
    """Variance between the positions' mean figures, weighted by their counts."""
    _, codes, counts = np.unique(positions, return_inverse=True, return_counts=True)
    means = np.bincount(codes, weights=figures) / counts
    return float(np.average((means - figures.mean()) ** 2, weights=counts))


def _codes(column: FloatArray) -> IndexArray:
    return np.asarray(np.unique(column, return_inverse=True)[1], dtype=np.int64)

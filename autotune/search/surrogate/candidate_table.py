"""Candidates as arrays, built once per study: a step over thousands of them is a few comparisons.

Notation, for n candidates:

    row        position of a candidate; all arrays of the surrogate are in this order
    load       number of what a candidate needs loaded (model, engine); shared by many candidates
    demands    shape (n, d): if demands[i] >= demands[j] in every column, candidate i needs at least
               the memory of candidate j
    features   numeric knobs scaled to 0..1, shape (n, p), and categorical knobs as codes, (n, q)

Each knob has three demand columns: category, -category, size. A knob whose memory grows (shrinks)
with its value has the value (its negative) as size. Values of any other knob are categories. A
category appears with both signs, so `>=` in both columns means that the categories are equal.

    batch (grows)  engine (unclear)   demands
    1              vllm               0  0  1    1 -1  0
    4              vllm               0  0  4    1 -1  0
    4              none               0  0  4    2 -2  0

The second candidate needs at least the memory of the first. The third is comparable with neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.core.space import Candidate, Knob, KnobValue, SearchSpace

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.int64]
LoadSetting = tuple[str, KnobValue]

MIN_SCALE_VALUES = 3  # Distinct numbers from which a knob is a scale; fewer are categories
SWITCH_DOUBLINGS = 2.0  # Doublings of memory that count for a switch


class Features(NamedTuple):
    """Knobs with more than one value, as columns."""

    numeric: FloatArray
    categorical: IndexArray


class CandidateTable:
    """Candidates by row."""

    def __init__(self, space: SearchSpace, candidates: Iterable[Candidate]) -> None:
        self.space = space
        distinct = dict.fromkeys(candidates)
        self.candidates: tuple[Candidate, ...] = tuple(distinct)
        self.row_by_id: dict[str, int] = {}
        for row, candidate in enumerate(self.candidates):
            self.row_by_id[candidate.id] = row
        self.load_number: dict[str, int] = {}  # By load key
        self.load_examples: dict[int, Candidate] = {}  # First candidate of each load
        loads = []
        for candidate in self.candidates:
            if candidate.load_key not in self.load_number:
                self.load_number[candidate.load_key] = len(self.load_examples)
                self.load_examples[len(self.load_examples)] = candidate
            number = self.load_number[candidate.load_key]
            loads.append(number)
        self.loads: IndexArray = np.array(loads, dtype=np.int64)
        examples = self.load_examples.values()
        self.load_settings = tuple(settings_of_load(example) for example in examples)

    def __len__(self) -> int:
        return len(self.candidates)

    def mask(self, ids: Iterable[str]) -> BoolArray:
        """Return True for these candidates; unknown ids are ignored."""
        mask = np.zeros(len(self), dtype=bool)
        for candidate_id in ids:
            if candidate_id in self.row_by_id:
                mask[self.row_by_id[candidate_id]] = True
        return mask

    def rows_of(self, candidates: Iterable[Candidate]) -> IndexArray:
        rows = [self.row_by_id[candidate.id] for candidate in candidates]
        return np.array(rows, dtype=np.int64)

    def is_loaded(self, load_keys: Iterable[str]) -> BoolArray:
        """Return True for candidates with one of these loads; unknown loads are ignored."""
        loaded = np.zeros(len(self.load_number), dtype=bool)
        for key in load_keys:
            if key in self.load_number:
                loaded[self.load_number[key]] = True
        return loaded[self.loads]

    # 1. Order of memory demand.

    @cached_property
    def demands(self) -> FloatArray:
        """Category, -category and size of each knob."""
        return self._varying_demands(columns_per_knob=3)

    @cached_property
    def _categories(self) -> FloatArray:
        """Category of each knob; its order of memory demand is left out."""
        return self._varying_demands(columns_per_knob=1)

    def _varying_demands(self, columns_per_knob: int) -> FloatArray:
        """Stack the first demand columns of each knob that are not constant."""
        varying = []
        for knob in self.space.knobs:
            columns = _demand_columns(knob, self.candidates)
            for column in columns[:columns_per_knob]:
                varies = len(column) and (column != column[0]).any()
                if varies:
                    varying.append(column)
        if not varying:
            return np.zeros((len(self), 1))
        return np.column_stack(varying)

    def demanding_at_least(self, row: int) -> BoolArray:
        """Return True for candidates that need at least this one's memory, itself included."""
        demand = self.demands[row]
        return in_all_columns(self.demands >= demand)

    def demanding_at_most(self, row: int) -> BoolArray:
        """Return True for candidates that need at most this one's memory, itself included."""
        demand = self.demands[row]
        return in_all_columns(self.demands <= demand)

    def demanding_at_least_any(self, mask: BoolArray) -> BoolArray:
        """Return True for candidates that need at least the memory of any in `mask`."""
        result = np.zeros(len(self), dtype=bool)
        demands = self.demands[mask]
        distinct = np.unique(demands, axis=0)
        for demand in distinct:
            if not _is_dominated(demand, distinct):
                result |= in_all_columns(self.demands >= demand)
        return result

    def differing_in_batches(self, row: int) -> BoolArray:
        """Return True for candidates with this one's load and categories: they differ only in
        batch shape and recomputation.
        """
        same_load: BoolArray = self.loads == self.loads[row]
        same_categories = self._categories == self._categories[row]
        return same_load & in_all_columns(same_categories)

    def least_demanding(self, rows: IndexArray) -> int:
        """Return the first of `rows` that needs more memory than no other one."""
        demands = self.demands[rows]
        may_be_least = np.ones(len(rows), dtype=bool)
        for place, demand in enumerate(demands):
            if not may_be_least[place]:
                continue
            if not _is_dominated(demand, demands):
                return int(rows[place])
            # No demand above a dominated one is minimal either.
            may_be_least &= ~in_all_columns(demands >= demand)
        raise ValueError("least_demanding: no candidates. Pass at least one index.")

    # 2. Features of the regression.

    @cached_property
    def features(self) -> Features:
        numeric: list[FloatArray] = []
        categorical: list[IndexArray] = []
        for knob in self.space.knobs:
            values = [candidate.knobs.get(knob.name) for candidate in self.candidates]
            distinct = set(values)
            if len(distinct) < 2:
                continue
            if _is_scale(distinct):
                numeric.append(_scaled(values))
            else:
                categorical.append(_coded(values))
        empty = np.zeros((len(self), 0))
        no_codes = empty.astype(np.int64)
        return Features(
            numeric=np.column_stack(numeric or [empty]),
            categorical=np.column_stack(categorical or [no_codes]),
        )

    @cached_property
    def decided_by_load(self) -> tuple[BoolArray, BoolArray]:
        """True for numeric, and for categorical, features that are constant within every load."""
        _, first_row_of_load = np.unique(self.loads, return_index=True)
        first_rows = first_row_of_load[self.loads]
        numeric, categorical = self.features
        decides_numeric = numeric == numeric[first_rows]
        decides_categorical = categorical == categorical[first_rows]
        return decides_numeric.all(axis=0), decides_categorical.all(axis=0)

    @cached_property
    def kinds(self) -> FloatArray:
        """One-hot columns of the set of knobs that apply: a candidate with an engine has other
        knobs than one without.
        """
        numbers: dict[frozenset[str], int] = {}
        kinds = []
        for candidate in self.candidates:
            knob_names = frozenset(candidate.knobs)
            number = numbers.setdefault(knob_names, len(numbers))
            kinds.append(number)
        one_hot = np.eye(len(numbers))
        rows = np.array(kinds, dtype=np.int64)
        return one_hot[rows]

    @cached_property
    def steps(self) -> FloatArray:
        """Doublings of declared memory consumers, centred."""
        doublings = np.zeros(len(self))
        for knob in self.space.knobs:
            if knob.effect != "neutral" or knob.memory not in ("grows", "shrinks"):
                continue
            values = [effective_value(knob, candidate) for candidate in self.candidates]
            if knob.memory == "grows":
                doublings += _doublings(values)
            else:
                doublings -= _doublings(values)
        centred = doublings - doublings.mean()
        return np.asarray(centred)


def settings_of_load(candidate: Candidate) -> frozenset[LoadSetting]:
    """Return the settings that the candidate's load decides."""
    return frozenset(candidate.load.items())


def in_all_columns(flags: BoolArray) -> BoolArray:
    """Return True for the rows whose flags are all True."""
    return np.asarray(flags.all(axis=1))


def _is_dominated(demand: FloatArray, demands: FloatArray) -> bool:
    """Return True if any of `demands` is at most this one, and lower in a column."""
    is_lower = (demands < demand).any(axis=1)
    is_at_most = in_all_columns(demands <= demand)
    return bool(np.any(is_at_most & is_lower))


def _demand_columns(knob: Knob, candidates: Sequence[Candidate]) -> list[FloatArray]:
    """Return category, -category and size; none for a knob without effect on memory."""
    if knob.memory == "none":
        return []
    category = np.zeros(len(candidates))
    size = np.zeros(len(candidates))
    codes: dict[tuple[type, object], float] = {}
    for row, candidate in enumerate(candidates):
        value = effective_value(knob, candidate)
        if knob.memory == "unclear" or not isinstance(value, int | float):
            key = (type(value), value)
            next_code = len(codes) + 1.0
            category[row] = codes.setdefault(key, next_code)
        elif knob.memory == "grows":
            size[row] = value
        else:
            size[row] = -value
    return [category, -category, size]


def effective_value(knob: Knob, candidate: Candidate) -> object:
    """Return the value that determines the knob's memory; None if it does not apply or is
    unknown.
    """
    if not knob.through:
        return candidate.knobs.get(knob.name)
    product = 1
    for name in knob.through:
        factor = candidate.settings.get(name)
        if not factor:
            return None
        if isinstance(factor, int):
            product *= factor
    return product


def _is_scale(values: set[KnobValue]) -> bool:
    """Return True for enough numbers. None does not count: a candidate without a value differs in
    another knob as well.
    """
    numbers = values - {None}
    for value in numbers:
        is_number = isinstance(value, int | float)
        if isinstance(value, bool) or not is_number:
            return False
    return len(numbers) >= MIN_SCALE_VALUES


def _scaled(values: Sequence[object]) -> FloatArray:
    """Scale to 0..1; without a value: 0.5. Positive values by logarithms, so that each doubling is
    one equal step.
    """
    positions = np.array(values, dtype=float)  # None becomes NaN
    missing = np.isnan(positions)
    present = positions[~missing]
    if (present > 0).all():
        positions = np.log(positions)
    lowest = np.nanmin(positions)
    highest = np.nanmax(positions)
    scaled = (positions - lowest) / (highest - lowest)
    return np.where(missing, 0.5, scaled)


def _coded(values: Sequence[object]) -> IndexArray:
    codes: dict[tuple[type, object], int] = {}
    column = []
    for value in values:
        key = (type(value), value)
        code = codes.setdefault(key, len(codes))
        column.append(code)
    return np.array(column, dtype=np.int64)


def _doublings(values: Sequence[object]) -> FloatArray:
    """Return log2(value / smallest value); 0 for a value that is no positive number."""
    are_switches = all(isinstance(value, bool) for value in values)
    if are_switches:
        switches = np.array(values, dtype=float)
        return SWITCH_DOUBLINGS * switches
    positive: dict[int, float] = {}
    for row, value in enumerate(values):
        if isinstance(value, int | float) and value > 0:
            positive[row] = value
    doublings = np.zeros(len(values))
    smallest = min(positive.values(), default=1.0)
    for row, number in positive.items():
        doublings[row] = math.log2(number / smallest)
    return doublings

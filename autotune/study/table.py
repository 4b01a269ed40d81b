"""The candidates as arrays, made once: what is asked of thousands of them in every step is then a few comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autotune.candidate import Candidate
from autotune.space import Knob, SearchSpace

Flags = NDArray[np.bool_]
Numbers = NDArray[np.float64]
Places = NDArray[np.int64]


class Table:
    """Candidates by place. Rows of every array here are in the same order."""

    def __init__(self, space: SearchSpace, candidates: Iterable[Candidate]) -> None:
        self.space = space
        self.candidates: tuple[Candidate, ...] = tuple(dict.fromkeys(candidates))
        self.place = {candidate.id: place for place, candidate in enumerate(self.candidates)}
        loads = {key: number for number, key in enumerate(dict.fromkeys(one.load_key for one in self.candidates))}
        self.loads: Places = np.array([loads[one.load_key] for one in self.candidates], dtype=np.int64)
        self.load_number = loads
        self.load_examples = {loads[one.load_key]: one for one in reversed(self.candidates)}
        """One candidate of each load."""

    def __len__(self) -> int:
        return len(self.candidates)

    def mask(self, ids: Iterable[str]) -> Flags:
        """True for these candidates; those that the table does not have are passed over."""
        found = np.zeros(len(self), dtype=bool)
        for name in ids:
            if name in self.place:
                found[self.place[name]] = True
        return found

    def places(self, candidates: Iterable[Candidate]) -> Places:
        return np.array([self.place[one.id] for one in candidates], dtype=np.int64)

    @cached_property
    def demands(self) -> Numbers:
        """Columns that are all at least as high where a candidate is known to need at least the memory of another."""
        return _columns(self.candidates, [column for knob in self.space.knobs for column in _demand_columns(knob)])

    @cached_property
    def _kinds(self) -> Numbers:
        """Columns that are the same where candidates differ only in what goes up and down with the need for memory."""
        return _columns(self.candidates, [column for knob in self.space.knobs for column in _demand_columns(knob)[:1]])

    def demanding_at_least(self, place: int) -> Flags:
        """Who is known to need at least the memory of this one, itself included."""
        return np.asarray((self.demands >= self.demands[place]).all(axis=1))

    def demanding_at_most(self, place: int) -> Flags:
        """Who is known to need at most the memory of this one, itself included."""
        return np.asarray((self.demands <= self.demands[place]).all(axis=1))

    def needing_any(self, those: Flags) -> Flags:
        """Who is known to need at least the memory of any of these."""
        rows = np.unique(self.demands[those], axis=0)
        least = [row for row in rows if not ((rows <= row).all(axis=1) & (rows < row).any(axis=1)).any()]
        return np.asarray(np.any([(self.demands >= row).all(axis=1) for row in least], axis=0))

    def beside_batches(self, place: int) -> Flags:
        """Who has the load of this one and whatever else cannot be put in an order: what is left to differ is the shape of
        batches and what is recomputed."""
        return np.asarray((self.loads == self.loads[place]) & (self._kinds == self._kinds[place]).all(axis=1))

    def least_demanding(self, places: Places) -> int:
        """The first of `places` that none of the others is known to need less than."""
        rows, open_still = self.demands[places], np.ones(len(places), dtype=bool)
        for number, row in enumerate(rows):
            if open_still[number]:
                if not ((rows <= row).all(axis=1) & (rows < row).any(axis=1)).any():
                    return int(places[number])
                open_still &= ~(rows >= row).all(axis=1)  # nor is anything the least that needs as much as this one
        raise ValueError("of no places there is no first")

    @cached_property
    def features(self) -> tuple[Numbers, Places]:
        """What tells candidates apart: moving numeric knobs from 0 to 1, and moving knobs as categories."""
        numeric = [knob for knob in self._moving if _is_numeric(knob, self.candidates)]
        others = self._by_name
        numbers = np.column_stack(
            [_scaled([one.knobs.get(knob.name) for one in self.candidates]) for knob in numeric] or [self._none]
        )
        categories = [_coded([one.knobs.get(knob.name) for one in self.candidates]) for knob in others]
        return numbers, np.column_stack(categories or [self._none.astype(np.int64)])

    @cached_property
    def decided_by_load(self) -> tuple[Flags, Flags]:
        """Which features, and which categories, are the same for all candidates of one load."""
        firsts = np.zeros(len(self.load_number), dtype=np.int64)
        firsts[self.loads[::-1]] = np.arange(len(self))[::-1]
        numbers, categories = self.features
        first = firsts[self.loads]
        return (numbers == numbers[first]).all(axis=0), (categories == categories[first]).all(axis=0)

    @cached_property
    def kinds(self) -> Numbers:
        """A column for each set of knobs that apply together, 1 where a candidate has just these: one with an engine has other
        knobs than one without."""
        names = [frozenset(one.knobs) for one in self.candidates]
        return np.array([[float(mine == kind) for kind in dict.fromkeys(names)] for mine in names])

    @cached_property
    def steps(self) -> Numbers:
        """How many doublings each candidate spends of what is declared to take memory; a switch counts as two of them."""
        found = np.zeros(len(self))
        for knob in self.space.knobs:
            if knob.memory in ("grows", "shrinks") and knob.effect == "neutral":
                values = [acting(knob, one) for one in self.candidates]
                found += _doublings(values) if knob.memory == "grows" else -_doublings(values)
        return np.asarray(found - found.mean())

    @cached_property
    def _moving(self) -> list[Knob]:
        return [knob for knob in self.space.knobs if len({one.knobs.get(knob.name) for one in self.candidates}) > 1]

    @cached_property
    def _by_name(self) -> list[Knob]:
        return [knob for knob in self._moving if not _is_numeric(knob, self.candidates)]

    @property
    def _none(self) -> Numbers:
        return np.zeros((len(self), 0))


def _columns(candidates: Sequence[Candidate], columns: Sequence[Callable[[Candidate], float]]) -> Numbers:
    """One array of all columns, without those that are the same for everyone."""
    filled = [np.array([column(one) for one in candidates], dtype=float) for column in columns]
    moving = [values for values in filled if len(values) and (values != values[0]).any()]
    return np.column_stack(moving) if moving else np.zeros((len(candidates), 1))


def _demand_columns(knob: Knob) -> list[Callable[[Candidate], float]]:
    """Values that can be ordered go up with the need for memory; the others are comparable only where they are the same."""
    if knob.memory == "none":
        return []
    kinds: dict[tuple[type, object], float] = {}

    def kind(candidate: Candidate) -> float:
        value = acting(knob, candidate)
        if knob.memory != "unclear" and isinstance(value, (int, float)):
            return 0.0
        return kinds.setdefault((type(value), value), len(kinds) + 1.0)

    def size(candidate: Candidate) -> float:
        value = acting(knob, candidate)
        if knob.memory == "unclear" or not isinstance(value, (int, float)):
            return 0.0
        return float(value) if knob.memory == "grows" else -float(value)

    return [kind, lambda candidate: -kind(candidate), size]


def acting(knob: Knob, candidate: Candidate) -> object:
    """The value by which the knob acts on memory; None where it does not apply or is not known."""
    if not knob.through:
        return candidate.knobs.get(knob.name)
    factors = [candidate.settings.get(name) for name in knob.through]
    return math.prod(factor for factor in factors if isinstance(factor, int)) if all(factors) else None


def _is_numeric(knob: Knob, candidates: Sequence[Candidate]) -> bool:
    """Whether it is a scale; who has no value on it is told apart by another knob."""
    values = {one.knobs.get(knob.name) for one in candidates} - {None}
    return len(values) > 2 and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _scaled(values: Sequence[object]) -> Numbers:
    """From 0 to 1, by their logarithms where all are above zero: doubling a batch is one step, wherever it starts. Without a
    value: the middle."""
    numbers = np.array([math.nan if value is None else value for value in values], dtype=float)
    known = numbers[~np.isnan(numbers)]
    spread = np.log(numbers) if (known > 0).all() else numbers
    least, most = np.nanmin(spread), np.nanmax(spread)
    return np.where(np.isnan(spread), 0.5, (spread - least) / (most - least))


def _doublings(values: Sequence[object]) -> Numbers:
    """Against the smallest; 0 where a value is no number."""
    if all(isinstance(value, bool) for value in values):
        return 2.0 * np.array(values, dtype=float)
    known = [float(value) for value in values if isinstance(value, (int, float)) and value > 0]
    if not known:
        return np.zeros(len(values))
    least = min(known)
    return np.array([math.log2(value / least) if isinstance(value, (int, float)) and value > 0 else 0.0 for value in values])


def _coded(values: Sequence[object]) -> Places:
    codes: dict[tuple[type, object], int] = {}
    return np.array([codes.setdefault((type(value), value), len(codes)) for value in values], dtype=np.int64)

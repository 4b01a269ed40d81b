"""Candidates as parameters of Optuna, under the user's names of the settings.

Every trial has all parameters. A knob that does not apply to a candidate (the share of an engine
that is not used) has the value "absent", a category like any other. Optuna's samplers model the
parameters that all trials have in common: one that some trials lack would be drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from autotune.core.space import Candidate, Knob, KnobValue, SearchSpace
from autotune.search.surrogate.candidate_table import FloatArray, IndexArray

ABSENT_VALUE = "absent"


class Parameters:
    """Parameters of a fixed list of candidates."""

    def __init__(self, space: SearchSpace, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.distributions = _distributions(space, candidates)
        self._candidate_by_values: dict[tuple[str, ...], Candidate] = {}
        for candidate in candidates:
            params = self.of(candidate)
            values = self._values(params)
            self._candidate_by_values.setdefault(values, candidate)

    def of(self, candidate: Candidate) -> dict[str, KnobValue]:
        return {name: candidate.knobs.get(name, ABSENT_VALUE) for name in self.distributions}

    def candidate_of(self, params: Mapping[str, Any]) -> Candidate | None:
        """Return the candidate with these values; None if a value is missing or no candidate has
        them.
        """
        if not self.distributions.keys() <= params.keys():
            return None
        values = self._values(params)
        return self._candidate_by_values.get(values)

    def _values(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the values as text: as dictionary keys, 1 and True are equal."""
        return tuple(repr(params[name]) for name in self.distributions)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Request a value of each parameter from the trial, as a user's own objective would."""
        for name, distribution in self.distributions.items():
            if isinstance(distribution, IntDistribution):
                trial.suggest_int(name, distribution.low, distribution.high, log=True)
            elif isinstance(distribution, FloatDistribution):
                trial.suggest_float(name, distribution.low, distribution.high)
            elif isinstance(distribution, CategoricalDistribution):
                trial.suggest_categorical(name, distribution.choices)
        return trial.params

    def distances(self, proposal: Mapping[str, Any], rows: IndexArray) -> FloatArray:
        """Return the distance of the rows to a proposal: per parameter from 0 to 1."""
        distances = np.zeros(len(rows))
        for name, value in proposal.items():
            if name not in self.distributions:
                continue
            distribution = self.distributions[name]
            position = _position(distribution, value)
            positions = self._positions[name][rows]
            apart = np.abs(positions - position)
            if isinstance(distribution, CategoricalDistribution):
                apart = np.where(apart > 0, 1.0, 0.0)
            distances += apart
        return distances

    @cached_property
    def _positions(self) -> dict[str, FloatArray]:
        positions = {}
        params_by_row = [self.of(candidate) for candidate in self.candidates]
        for name, distribution in self.distributions.items():
            places = [_position(distribution, params[name]) for params in params_by_row]
            positions[name] = np.array(places)
        return positions


def _distributions(
    space: SearchSpace, candidates: Sequence[Candidate]
) -> dict[str, BaseDistribution]:
    """Return one distribution per moving knob; if no knob moves, of all. The choices of the space
    are included even if no candidate has them, so that they stay the same when rules change.
    """
    moving: dict[str, BaseDistribution] = {}
    constant: dict[str, BaseDistribution] = {}
    for knob in space.knobs:
        choices = _choices(knob, candidates)
        distributions = moving if len(choices) > 1 else constant
        distributions[knob.name] = _distribution(choices)
    return moving or constant


def _choices(knob: Knob, candidates: Sequence[Candidate]) -> list[KnobValue]:
    choices = {(type(choice), choice): choice for choice in knob.choices}
    for candidate in candidates:
        value = candidate.knobs.get(knob.name, ABSENT_VALUE)
        choices[type(value), value] = value
    return list(choices.values())


def _distribution(choices: Sequence[KnobValue]) -> BaseDistribution:
    """Return a range of numbers if all are numbers, integers on a log scale; else categories."""
    counts: list[int] = []
    shares: list[float] = []
    for choice in choices:
        if isinstance(choice, int) and not isinstance(choice, bool) and choice > 0:
            counts.append(choice)
        elif isinstance(choice, float):
            shares.append(choice)
    if len(counts) == len(choices):
        return IntDistribution(min(counts), max(counts), log=True)
    if len(shares) == len(choices):
        return FloatDistribution(min(shares), max(shares))
    return CategoricalDistribution(choices)


def _position(distribution: BaseDistribution, value: Any) -> float:
    """Return a value scaled to 0..1, or a category's number."""
    if not isinstance(distribution, (IntDistribution, FloatDistribution)):
        return distribution.to_internal_repr(value)
    if distribution.low == distribution.high:
        return 0.0
    scale = math.log if distribution.log else float
    lowest = scale(distribution.low)
    highest = scale(distribution.high)
    return (scale(value) - lowest) / (highest - lowest)

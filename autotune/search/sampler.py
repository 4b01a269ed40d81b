"""Optuna's own samplers in place of the acquisition value: `--sampler tpe`, `gp` and `random`.

A sampler proposes any point of the space, legal or not, measured or not. Its proposal is replaced
by the nearest candidate of the agenda's pool. A trial's parameters are always those of the measured
candidate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from autotune.core.errors import MissingExtra
from autotune.core.job import SamplerName
from autotune.core.space import Candidate, KnobValue, SearchSpace
from autotune.search.surrogate.candidate_table import FloatArray, IndexArray

STARTUP_TRIALS = 5  # Random trials before a sampler's model


def distributions_of(space: SearchSpace, baseline: Candidate | None) -> dict[str, BaseDistribution]:
    """Return one distribution per moving knob, fixed for the whole study; integers on a log
    scale. The baseline's values are included, since it need not be a point of the space. If no knob
    moves, all have one.
    """
    moving: dict[str, BaseDistribution] = {}
    constant: dict[str, BaseDistribution] = {}
    for knob in space.knobs:
        choices = list(knob.choices)
        if baseline is not None and knob.name in baseline.knobs:
            baseline_value = baseline.knobs[knob.name]
            choices.append(baseline_value)
        distinct = {(type(choice), choice) for choice in choices}
        distributions = moving if len(distinct) > 1 else constant
        distributions[knob.name] = _distribution(choices)
    return moving or constant


def _distribution(choices: Sequence[KnobValue]) -> BaseDistribution:
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
    distinct = list(dict.fromkeys(choices))
    return CategoricalDistribution(distinct)


class StockSampler:
    """Sampler of Optuna's whose proposals are replaced by the nearest candidate of the pool."""

    def __init__(
        self,
        sampler: BaseSampler,
        distributions: Mapping[str, BaseDistribution],
        candidates: Sequence[Candidate],
        seed: int,
    ) -> None:
        self._sampler = sampler
        self._distributions = distributions
        self._random = random.Random(seed)
        self._positions: dict[str, FloatArray] = {}  # By knob and row
        for name, distribution in distributions.items():
            positions = np.full(len(candidates), np.nan)  # NaN: no such knob
            for row, candidate in enumerate(candidates):
                if name in candidate.knobs:
                    value = candidate.knobs[name]
                    positions[row] = _position(distribution, value)
            self._positions[name] = positions

    def choose(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        pool: IndexArray,
    ) -> int:
        """Return the row with the smallest distance to the proposal; ties are drawn."""
        self._sampler.before_trial(study, trial)
        space = self._sampler.infer_relative_search_space(study, trial)
        proposal: Mapping[str, Any] = {}
        if space:
            proposal = self._sampler.sample_relative(study, trial, space)
        distances = np.zeros(len(pool))
        for name, value in proposal.items():
            if name in self._positions:
                knob_distances = self._distances(name, value)
                distances += knob_distances[pool]
        nearest = pool[distances == distances.min()]
        return int(self._random.choice(nearest))

    def _distances(self, name: str, value: Any) -> FloatArray:
        """Return each candidate's distance in one knob, from 0 to 1; 0 without such a knob."""
        distribution = self._distributions[name]
        position = _position(distribution, value)
        distances = np.abs(self._positions[name] - position)
        if isinstance(distribution, CategoricalDistribution):
            distances = np.where(distances > 0, 1.0, distances)
        return np.asarray(np.nan_to_num(distances))


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


def stock_sampler(
    name: SamplerName,
    distributions: Mapping[str, BaseDistribution],
    candidates: Sequence[Candidate],
    seed: int,
) -> StockSampler | None:
    """Return Optuna's sampler of that name; None for `value`, which is `most_valuable`."""
    if name == "value":
        return None
    sampler = _optuna_sampler(name, seed)
    return StockSampler(sampler, distributions, candidates, seed)


def _optuna_sampler(name: SamplerName, seed: int) -> BaseSampler:
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
    try:
        import_module("scipy")
        import_module("torch")
    except ImportError as missing:
        raise MissingExtra("--sampler gp", "train") from missing
    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS)

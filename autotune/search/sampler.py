"""Samplers restricted to the agenda's pool of candidates.

`--sampler value` selects the highest acquisition value. With one of Optuna's own samplers, its
proposal is replaced by the nearest candidate of the pool. A trial's parameters are always those of
the measured candidate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from autotune.catalog.simplicity import complexity
from autotune.core.errors import MissingExtra
from autotune.core.job import SamplerName
from autotune.core.space import Candidate, KnobValue, SearchSpace
from autotune.search.surrogate.candidate_table import FloatArray, IndexArray


def distributions_of(space: SearchSpace, baseline: Candidate | None) -> dict[str, BaseDistribution]:
    """Return one distribution per moving knob, fixed for the whole study; integers on a log scale. The baseline's values are
    included, since it need not be a point of the space."""
    beside = baseline.knobs if baseline else {}
    values = {knob.name: [*knob.choices, *([beside[knob.name]] if knob.name in beside else [])] for knob in space.knobs}
    moving = {name: among for name, among in values.items() if len({(type(value), value) for value in among}) > 1}
    return {name: _distribution(among) for name, among in (moving or values).items()}


def _distribution(choices: Sequence[KnobValue]) -> BaseDistribution:
    if all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in choices):
        numbers = [int(value) for value in choices if value is not None]
        return IntDistribution(min(numbers), max(numbers), log=True)
    if all(isinstance(value, float) for value in choices):
        shares = [float(value) for value in choices if value is not None]
        return FloatDistribution(min(shares), max(shares))
    return CategoricalDistribution(list(dict.fromkeys(choices)))


EQUAL_VALUE_SHARE = 0.05  # Difference of acquisition values, as a share, below which the simpler candidate is measured


class PoolSampler:
    """Sampler over the pool that is set before each ask. Subclasses choose among several candidates."""

    def __init__(self, distributions: Mapping[str, BaseDistribution], candidates: Sequence[Candidate]) -> None:
        self.distributions, self._candidates = dict(distributions), candidates
        self.pool: IndexArray = np.zeros(0, dtype=np.int64)
        """Rows of the candidates to choose from."""

    def select(self, study: optuna.Study, trial: FrozenTrial) -> Candidate:
        """Return the trial's candidate."""
        return self._candidates[self.pool[0] if len(self.pool) == 1 else self.choose(study, trial)]

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        """Return the row of one of several candidates."""
        raise NotImplementedError


class ValueSampler(PoolSampler):
    """Highest acquisition value; of nearly equal ones that of the simplest candidate."""

    def __init__(self, distributions: Mapping[str, BaseDistribution], candidates: Sequence[Candidate]) -> None:
        super().__init__(distributions, candidates)
        self.acquisition: Callable[[], FloatArray] = lambda: np.zeros(len(self.pool))
        """Return the acquisition value of each candidate of the pool; set with the pool."""

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        values = self.acquisition()
        best = np.flatnonzero(values >= (1 - EQUAL_VALUE_SHARE) * values.max())
        chosen = min(best, key=lambda place: (complexity(self._candidates[int(self.pool[place])]), -values[place]))
        return int(self.pool[chosen])


class StockSampler(PoolSampler):
    """One of Optuna's samplers, its proposals replaced by the nearest candidate of the pool."""

    def __init__(
        self, inner: BaseSampler, distributions: Mapping[str, BaseDistribution], candidates: Sequence[Candidate], seed: int
    ) -> None:
        super().__init__(distributions, candidates)
        self._inner = inner
        self._random = random.Random(seed)
        self._positions = {
            name: np.array([_position(one, who.knobs[name]) if name in who.knobs else np.nan for who in candidates])
            for name, one in distributions.items()
        }

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        """Return the row with the smallest distance to the proposal; ties are drawn."""
        self._inner.before_trial(study, trial)
        space = self._inner.infer_relative_search_space(study, trial)
        proposal = self._inner.sample_relative(study, trial, space) if space else {}
        distances = np.zeros(len(self.pool))
        for name, value in proposal.items():
            if name not in self._positions:
                continue
            apart = np.abs(self._positions[name][self.pool] - _position(self.distributions[name], value))
            if isinstance(self.distributions[name], CategoricalDistribution):
                apart = np.where(apart > 0, 1.0, apart)
            distances += np.nan_to_num(apart)  # from 0 to 1; 0 without such a knob
        return int(self._random.choice(self.pool[distances == distances.min()]))


def _position(distribution: BaseDistribution, value: Any) -> float:
    """Return a value scaled to 0..1, or a category's number."""
    if not isinstance(distribution, (IntDistribution, FloatDistribution)):
        return distribution.to_internal_repr(value)
    if distribution.low == distribution.high:
        return 0.0
    scale = math.log if distribution.log else float
    return (scale(value) - scale(distribution.low)) / (scale(distribution.high) - scale(distribution.low))


def make_sampler(
    name: SamplerName, distributions: Mapping[str, BaseDistribution], candidates: Sequence[Candidate], seed: int
) -> PoolSampler:
    """Return the sampler of that name."""
    if name == "value":
        return ValueSampler(distributions, candidates)
    stock: BaseSampler
    if name == "random":
        stock = optuna.samplers.RandomSampler(seed=seed)
    elif name == "tpe":
        stock = optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
    else:
        try:
            import_module("scipy")
            import_module("torch")
        except ImportError as missing:
            raise MissingExtra("--sampler gp", "train") from missing
        stock = optuna.samplers.GPSampler(seed=seed, n_startup_trials=5)
    return StockSampler(stock, distributions, candidates, seed)

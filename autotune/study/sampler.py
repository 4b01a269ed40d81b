"""Samplers that only ever propose what is worth measuring now.

`--sampler value` takes the member of the pool that promises the most for the seconds that measuring it takes. With one of
Optuna's own samplers, that one makes the proposal and the nearest candidate of the pool takes its place. Either way the
parameters of a trial are those of the candidate that was measured.
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

from autotune.candidate import Candidate, KnobValue
from autotune.errors import MissingExtra
from autotune.question import SamplerName
from autotune.space import SearchSpace
from autotune.study.table import Numbers, Places


def distributions_of(space: SearchSpace, baseline: Candidate | None) -> dict[str, BaseDistribution]:
    """One distribution per moving knob, fixed for the whole study: whole numbers on a log scale, categories as they are.

    The baseline need not be a point of the space, so its values are taken in. What never moves is no parameter.
    """
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


class PoolSampler:
    """Kept to a pool that is set before each ask; who of it is chosen is the heirs' to say."""

    def __init__(self, distributions: Mapping[str, BaseDistribution], candidates: Sequence[Candidate]) -> None:
        self.distributions, self._candidates = dict(distributions), candidates
        self.pool: Places = np.zeros(0, dtype=np.int64)
        """Who may be chosen, by their places among the candidates."""

    def settle(self, study: optuna.Study, trial: FrozenTrial) -> Candidate:
        """The member of the pool that this trial is about."""
        return self._candidates[self.pool[0] if len(self.pool) == 1 else self.choose(study, trial)]

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        """The place of one of the pool, which has several."""
        raise NotImplementedError


class ValueSampler(PoolSampler):
    """The most promising for its cost; equals in the pool's own order."""

    def __init__(self, distributions: Mapping[str, BaseDistribution], candidates: Sequence[Candidate]) -> None:
        super().__init__(distributions, candidates)
        self.worth: Callable[[], Numbers] = lambda: np.zeros(len(self.pool))
        """What each of the pool is worth; set with the pool."""

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        return int(self.pool[self.worth().argmax()])


class StockSampler(PoolSampler):
    """Wraps one of Optuna's samplers and snaps what it proposes to the pool."""

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
        self._inner.before_trial(study, trial)
        return self._nearest(self._proposal(study, trial))

    def _proposal(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        space = self._inner.infer_relative_search_space(study, trial)
        return self._inner.sample_relative(study, trial, space) if space else {}

    def _nearest(self, proposal: Mapping[str, Any]) -> int:
        """The pool's member with the smallest distance in what was proposed; chance decides between equals."""
        distances = np.zeros(len(self.pool))
        for name, value in proposal.items():
            if name in self._positions:
                distances += self._apart(name, value)
        return int(self._random.choice(self.pool[distances == distances.min()]))

    def _apart(self, name: str, value: Any) -> Numbers:
        """How far each of the pool is from this value, from 0 to 1; 0 for who has no such knob."""
        distribution, there = self.distributions[name], self._positions[name][self.pool]
        apart = np.abs(there - _position(distribution, value))
        if isinstance(distribution, CategoricalDistribution):
            apart = np.where(apart > 0, 1.0, apart)
        return np.asarray(np.nan_to_num(apart))


def _position(distribution: BaseDistribution, value: Any) -> float:
    """A value of a knob on a scale from 0 to 1; a category's number."""
    if not isinstance(distribution, (IntDistribution, FloatDistribution)):
        return distribution.to_internal_repr(value)
    if distribution.low == distribution.high:
        return 0.0
    scale = math.log if distribution.log else float
    return (scale(value) - scale(distribution.low)) / (scale(distribution.high) - scale(distribution.low))


def make_sampler(
    name: SamplerName, distributions: Mapping[str, BaseDistribution], candidates: Sequence[Candidate], seed: int
) -> PoolSampler:
    """The sampler of that name, kept to the pool."""
    if name == "value":
        return ValueSampler(distributions, candidates)
    return StockSampler(_stock(name, seed), distributions, candidates, seed)


def _stock(name: SamplerName, seed: int) -> BaseSampler:
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
    try:
        import_module("scipy")
        import_module("torch")
    except ImportError as missing:
        raise MissingExtra("--sampler gp", "train") from missing
    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=5)

"""Choice of the candidate to measure among the agenda's pool.

`--sampler value` chooses the highest acquisition value: expected improvement per second that the
measurement takes. With one of Optuna's own samplers, its proposal is replaced by the nearest
candidate of the pool. A trial's parameters are always those of the measured candidate.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
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

from autotune.catalog import complexity
from autotune.core.answer import Trial
from autotune.core.errors import MissingExtra
from autotune.core.job import SamplerName
from autotune.core.space import Candidate, Knobs, KnobValue, SearchSpace
from autotune.search.surrogate.candidate_table import CandidateTable, FloatArray, IndexArray
from autotune.search.surrogate.estimates import Estimates
from autotune.search.surrogate.gaussian_process import expected_improvement
from autotune.search.trial_view import TrialView

# Difference of acquisition values, as a share, below which the simpler candidate is measured
EQUAL_VALUE_SHARE = 0.05
# Exponent of the chance of fitting before the first out-of-memory error, after one, and after more.
# An error costs more than its seconds; the first one is the price of locating the limit.
OOM_EXPONENTS = (1.5, 3.0, 5.0)
# Exponent of the seconds: at 1, cheap small steps would always precede expensive ones with a large
# gain
COST_EXPONENT = 0.5
DEFAULT_LOAD_PROBES = 3.0  # Assumed duration of a load in probes, before any load was measured


def most_valuable(view: TrialView, pool: IndexArray, live: Collection[str]) -> int:
    """Return the row with the highest acquisition value; of nearly equal ones that of the
    simplest candidate. `live`: keys of the loads that are ready; if empty, the load of the last
    probe.
    """
    values, candidates = acquisition_values(view, pool, live), view.table.candidates
    best = np.flatnonzero(values >= (1 - EQUAL_VALUE_SHARE) * values.max())
    chosen = min(best, key=lambda place: (complexity(candidates[int(pool[place])]), -values[place]))
    return int(pool[chosen])


def acquisition_values(view: TrialView, pool: IndexArray, live: Collection[str] = ()) -> FloatArray:
    """EI · P(fits)^c / seconds^COST_EXPONENT for each member of the pool; without a leader, all
    that fits is a gain.
    """
    trials, estimates = view.completed, view.estimates
    exponent = OOM_EXPONENTS[
        min(len(OOM_EXPONENTS) - 1, sum(one.measurement.outcome.is_out_of_memory for one in trials))
    ]
    if contenders := view.same_tier_contenders(view.table.candidates[pool[0]]):
        lead, deviation = estimates.speed.lead_over(view.leader(contenders))
        improvement = expected_improvement(lead[pool], deviation[pool], 0.0)
    else:
        mean, deviation = estimates.speed.mean[pool], estimates.speed.deviation[pool]
        improvement = expected_improvement(mean, deviation, float(np.max(mean)) - 1.0)
    gain = improvement * estimates.fits[pool] ** exponent
    if not view.problem.surrogate.options.value_per_second:
        return gain
    return np.asarray(
        gain / _seconds_to_measure(view.table, trials, estimates, live)[pool] ** COST_EXPONENT
    )


def _seconds_to_measure(
    table: CandidateTable, trials: Sequence[Trial], estimates: Estimates, live: Collection[str]
) -> FloatArray:
    """Return probe + load (0 where it is live) + P(out of memory) · reload, in seconds, for
    every candidate.
    """
    if not trials:
        return np.ones(len(table))
    probe = _probe_seconds(trials, estimates)
    load = _load_seconds(table, trials, float(np.median(probe)))
    ready = live or {
        one.candidate.load_key
        for one in trials[-1:]
        if not one.measurement.outcome.is_out_of_memory
    }
    is_ready = np.isin(
        table.loads, [table.load_number[key] for key in ready if key in table.load_number]
    )
    return np.asarray(probe + np.where(is_ready, 0.0, load) + (1 - estimates.fits) * load)


def _probe_seconds(trials: Sequence[Trial], estimates: Estimates) -> FloatArray:
    """Median seconds of a probe times the candidate's expected slowdown, within a factor of e."""
    costs = [trial.measurement.cost for trial in trials if trial.purpose != "confirm"] or [
        trials[-1].measurement.cost
    ]
    usual = max(statistics.median(cost.total_seconds - cost.load_seconds for cost in costs), 1e-3)
    speeds = [trial.measurement.ranking_speed for trial in trials]
    known = [speed.tokens_per_second for speed in speeds if speed is not None]
    if not known:
        return np.full(len(estimates.fits), usual)
    slower = np.log(statistics.median(known)) - estimates.speed.mean
    return np.asarray(usual * np.exp(np.clip(slower, -1.0, 1.0)))


def _load_seconds(table: CandidateTable, trials: Sequence[Trial], probe: float) -> FloatArray:
    """Median seconds of the measured loads that share the most settings with the candidate's
    load.
    """
    measured: dict[str, tuple[Knobs, list[float]]] = {}
    for trial in trials:
        if (seconds := trial.measurement.cost.load_seconds) > 0:
            measured.setdefault(trial.candidate.load_key, (trial.candidate.load, []))[1].append(
                seconds
            )
    by_load = np.empty(len(table.load_examples))
    for number, one in table.load_examples.items():
        similar = [
            (sum(load.get(name) == value for name, value in one.load.items()), many)
            for load, many in measured.values()
        ]
        most = max((count for count, _ in similar), default=0)
        nearest = [seconds for count, many in similar if count == most for seconds in many]
        by_load[number] = statistics.median(nearest) if nearest else DEFAULT_LOAD_PROBES * probe
    return np.asarray(by_load[table.loads])


def distributions_of(space: SearchSpace, baseline: Candidate | None) -> dict[str, BaseDistribution]:
    """Return one distribution per moving knob, fixed for the whole study; integers on a log
    scale. The baseline's values are included, since it need not be a point of the space.
    """
    beside = baseline.knobs if baseline else {}
    values = {
        knob.name: [*knob.choices, *([beside[knob.name]] if knob.name in beside else [])]
        for knob in space.knobs
    }
    moving = {
        name: among
        for name, among in values.items()
        if len({(type(value), value) for value in among}) > 1
    }
    return {name: _distribution(among) for name, among in (moving or values).items()}


def _distribution(choices: Sequence[KnobValue]) -> BaseDistribution:
    if all(
        isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in choices
    ):
        numbers = [int(value) for value in choices if value is not None]
        return IntDistribution(min(numbers), max(numbers), log=True)
    if all(isinstance(value, float) for value in choices):
        shares = [float(value) for value in choices if value is not None]
        return FloatDistribution(min(shares), max(shares))
    return CategoricalDistribution(list(dict.fromkeys(choices)))


class StockSampler:
    """One of Optuna's samplers, its proposals replaced by the nearest candidate of the pool."""

    def __init__(
        self,
        inner: BaseSampler,
        distributions: Mapping[str, BaseDistribution],
        candidates: Sequence[Candidate],
        seed: int,
    ) -> None:
        self._inner, self._distributions, self._random = inner, distributions, random.Random(seed)
        self._positions = {
            name: np.array(
                [
                    _position(one, who.knobs[name]) if name in who.knobs else np.nan
                    for who in candidates
                ]
            )
            for name, one in distributions.items()
        }

    def choose(self, study: optuna.Study, trial: FrozenTrial, pool: IndexArray) -> int:
        """Return the row with the smallest distance to the proposal; ties are drawn."""
        self._inner.before_trial(study, trial)
        space = self._inner.infer_relative_search_space(study, trial)
        proposal = self._inner.sample_relative(study, trial, space) if space else {}
        distances = np.zeros(len(pool))
        for name, value in proposal.items():
            if name not in self._positions:
                continue
            apart = np.abs(
                self._positions[name][pool] - _position(self._distributions[name], value)
            )
            if isinstance(self._distributions[name], CategoricalDistribution):
                apart = np.where(apart > 0, 1.0, apart)
            distances += np.nan_to_num(apart)  # from 0 to 1; 0 without such a knob
        return int(self._random.choice(pool[distances == distances.min()]))


def _position(distribution: BaseDistribution, value: Any) -> float:
    """Return a value scaled to 0..1, or a category's number."""
    if not isinstance(distribution, (IntDistribution, FloatDistribution)):
        return distribution.to_internal_repr(value)
    if distribution.low == distribution.high:
        return 0.0
    scale = math.log if distribution.log else float
    return (scale(value) - scale(distribution.low)) / (
        scale(distribution.high) - scale(distribution.low)
    )


def stock_sampler(
    name: SamplerName,
    distributions: Mapping[str, BaseDistribution],
    candidates: Sequence[Candidate],
    seed: int,
) -> StockSampler | None:
    """Return Optuna's sampler of that name; None for `value`, which is `most_valuable`."""
    stock: BaseSampler
    if name == "value":
        return None
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

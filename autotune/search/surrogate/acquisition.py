"""Acquisition: expected improvement of each candidate per second that its measurement takes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

import numpy as np

from autotune.core.answer import Trial
from autotune.core.space import Knobs
from autotune.search.search_options import SearchOptions
from autotune.search.surrogate.candidate_table import BoolArray, CandidateTable, FloatArray, IndexArray
from autotune.search.surrogate.estimates import Estimates
from autotune.search.surrogate.gaussian_process import expected_improvement, normal_cdf

MIN_GAIN = 0.02  # Smallest share of speed that counts as an improvement
MIN_CHANCE = 0.1  # Smallest chance of fitting and improving at which a candidate stays of interest
# Exponent of the chance of fitting before the first out-of-memory error, after one, and after more. An error costs more than
# its seconds; the first one is the price of locating the limit.
OOM_EXPONENTS = (1.5, 3.0, 5.0)
COST_EXPONENT = 0.5  # Exponent of the seconds: at 1, cheap small steps would always precede expensive ones with a large gain
DEFAULT_LOAD_PROBES = 3.0  # Assumed duration of a load in probes, before any load was measured


def acquisition_values(
    table: CandidateTable,
    trials: Sequence[Trial],
    estimates: Estimates,
    pool: IndexArray,
    leader: int | None,
    options: SearchOptions,
    live: Collection[str] = (),
) -> FloatArray:
    """EI · P(fits)^c / seconds^COST_EXPONENT for each member of the pool; without a leader, all that fits is a gain."""
    exponent = OOM_EXPONENTS[min(len(OOM_EXPONENTS) - 1, sum(one.measurement.outcome.is_out_of_memory for one in trials))]
    if leader is None:
        mean, deviation = estimates.speed.mean[pool], estimates.speed.deviation[pool]
        improvement = expected_improvement(mean, deviation, float(np.max(mean)) - 1.0)
    else:
        lead, deviation = estimates.speed.lead_over(leader)
        improvement = expected_improvement(lead[pool], deviation[pool], 0.0)
    gain = improvement * estimates.fits[pool] ** exponent
    if not options.value_per_second:
        return gain
    return np.asarray(gain / seconds_to_measure(table, trials, estimates, live)[pool] ** COST_EXPONENT)


def promising(estimates: Estimates, pool: IndexArray, leader: int) -> BoolArray:
    """True for members of the pool with P(fits) · P(lead over the leader > MIN_GAIN) >= MIN_CHANCE. The lead's deviation
    excludes the error that both have in common."""
    lead, deviation = estimates.speed.lead_over(leader)
    chance = estimates.fits[pool] * normal_cdf((lead[pool] - math.log1p(MIN_GAIN)) / deviation[pool])
    return np.asarray(chance >= MIN_CHANCE)


def seconds_to_measure(
    table: CandidateTable, trials: Sequence[Trial], estimates: Estimates, live: Collection[str] = ()
) -> FloatArray:
    """Return probe + load (0 where it is live) + P(out of memory) · reload, in seconds, for every candidate. `live`: keys of the
    loads that are ready; if empty, the load of the last probe."""
    if not trials:
        return np.ones(len(table))
    probe = _probe_seconds(trials, estimates)
    load = _load_seconds(table, trials, float(np.median(probe)))
    ready = live or {one.candidate.load_key for one in trials[-1:] if not one.measurement.outcome.is_out_of_memory}
    is_ready = np.isin(table.loads, [table.load_number[key] for key in ready if key in table.load_number])
    return np.asarray(probe + np.where(is_ready, 0.0, load) + (1 - estimates.fits) * load)


def _probe_seconds(trials: Sequence[Trial], estimates: Estimates) -> FloatArray:
    """Median seconds of a probe times the candidate's expected slowdown, within a factor of e."""
    costs = [trial.measurement.cost for trial in trials if trial.purpose != "confirm"] or [trials[-1].measurement.cost]
    usual = max(statistics.median(cost.total_seconds - cost.load_seconds for cost in costs), 1e-3)
    speeds = [trial.measurement.ranking_speed for trial in trials]
    known = [speed.tokens_per_second for speed in speeds if speed is not None]
    if not known:
        return np.full(len(estimates.fits), usual)
    slower = np.log(statistics.median(known)) - estimates.speed.mean
    return np.asarray(usual * np.exp(np.clip(slower, -1.0, 1.0)))


def _load_seconds(table: CandidateTable, trials: Sequence[Trial], probe: float) -> FloatArray:
    """Median seconds of the measured loads that share the most settings with the candidate's load."""
    measured: dict[str, tuple[Knobs, list[float]]] = {}
    for trial in trials:
        if (seconds := trial.measurement.cost.load_seconds) > 0:
            measured.setdefault(trial.candidate.load_key, (trial.candidate.load, []))[1].append(seconds)
    by_load = np.empty(len(table.load_examples))
    for number, one in table.load_examples.items():
        similar = [(sum(load.get(name) == value for name, value in one.load.items()), many) for load, many in measured.values()]
        most = max((count for count, _ in similar), default=0)
        nearest = [seconds for count, many in similar if count == most for seconds in many]
        by_load[number] = statistics.median(nearest) if nearest else DEFAULT_LOAD_PROBES * probe
    return np.asarray(by_load[table.loads])

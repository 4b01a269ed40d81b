"""Acquisition: the candidate of the agenda's pool whose measurement is worth most.

A pure function of the trials. For a candidate i and the leader of its tier:

    EI         expected improvement of the logarithmic speed over the leader, E[max(0, lead_i)],
               with EXPLORED_SHARE of the lead's deviation
    P          chance of fitting; 1 from LIKELY_CHANCE on, before any out-of-memory error
    c          exponent of the chance; it rises with the number of out-of-memory errors
    seconds    probe_i + load_i (0 if the load is live) + (1 - P) · load_i (to load again after an
               out-of-memory error)
    value      EI · P^c / seconds^COST_EXPONENT

Of candidates with the highest value, the simplest is measured.

Example: candidates A and B have EI = 0.04 and 0.06, P = 1, and their probes take 50 s. A's load is
live, B's takes 150 s. The values are 0.04 / √50 = 0.0057 and 0.06 / √200 = 0.0042: A is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

import numpy as np

from autotune.catalog import complexity
from autotune.core.answer import Trial
from autotune.search.predicted_order import LIKELY_CHANCE
from autotune.search.surrogate.candidate_table import (
    CandidateTable,
    FloatArray,
    IndexArray,
    LoadSetting,
    settings_of_load,
)
from autotune.search.surrogate.gaussian_process import expected_improvement
from autotune.search.trial_view import TrialView

# Share of an estimate's standard deviation that counts: the predicted order is followed unless
# another candidate is clearly less certain
EXPLORED_SHARE = 0.5
# Exponent of the chance of fitting before the first out-of-memory error, after one, and after more.
# An error costs more than its seconds; the first one is the price of locating the limit.
OOM_EXPONENTS = (1.5, 3.0, 5.0)
# Exponent of the seconds: at 1, cheap small steps would always precede expensive ones with a large
# gain
COST_EXPONENT = 0.5
MIN_PROBE_SECONDS = 1e-3


def most_valuable(
    view: TrialView,
    pool: IndexArray,
    live: Collection[str],
) -> int:
    """Return the row with the highest acquisition value; of equal ones that of the simplest
    candidate. `live`: keys of the loads that are ready; if empty, the load of the last
    probe.
    """
    values = acquisition_values(view, pool, live)
    equals = pool[np.isclose(values, values.max())]

    def simplicity(row: int) -> tuple[int, ...]:
        return complexity(view.table.candidates[row])

    return int(min(equals, key=simplicity))


def acquisition_values(
    view: TrialView,
    pool: IndexArray,
    live: Collection[str] = (),
) -> FloatArray:
    """Return the value of each member of the pool; without a leader, all that fits is a gain."""
    first = view.table.candidates[pool[0]]
    contenders = view.same_tier_contenders(first)
    if contenders:
        leader = view.leader(contenders)
        gain = expected_gains(view, leader, pool)
    else:
        speed = view.estimates.speed
        mean = speed.mean[pool]
        lead = mean - mean.max() + 1.0
        gain = _weighted_gains(view, pool, lead, speed.deviation[pool])
    if not view.problem.surrogate.options.value_per_second:
        return gain
    seconds = seconds_to_measure(view, live)
    cost = seconds[pool] ** COST_EXPONENT
    values: FloatArray = gain / cost
    return values


def expected_gains(
    view: TrialView,
    leader: int,
    pool: IndexArray,
) -> FloatArray:
    """Return EI · P^c of each member of the pool over the leader's row."""
    lead, deviation = view.estimates.speed.lead_over(leader)
    return _weighted_gains(view, pool, lead[pool], deviation[pool])


def _weighted_gains(
    view: TrialView,
    pool: IndexArray,
    lead: FloatArray,
    deviation: FloatArray,
) -> FloatArray:
    improvement = expected_improvement(lead, EXPLORED_SHARE * deviation, 0.0)
    weights = weights_of_fitting(view.estimates.fits[pool], view.completed)
    gains: FloatArray = improvement * weights
    return gains


def weights_of_fitting(chances: FloatArray, trials: Sequence[Trial]) -> FloatArray:
    """Return P^c. Until an out-of-memory error shows where the limit is, a candidate that is likely
    to fit counts as one that fits.
    """
    errors = sum(trial.measurement.outcome.is_out_of_memory for trial in trials)
    if not errors:
        chances = np.where(chances >= LIKELY_CHANCE, 1.0, chances)
    place = min(errors, len(OOM_EXPONENTS) - 1)
    return np.asarray(chances ** OOM_EXPONENTS[place])


def seconds_to_measure(view: TrialView, live: Collection[str]) -> FloatArray:
    """Return the expected seconds of every candidate, loads included."""
    if not view.completed:
        return np.ones(len(view.table))
    probe, load = expected_seconds(view)
    last = view.completed[-1]
    ran_out = last.measurement.outcome.is_out_of_memory
    if not live and not ran_out:
        live = {last.candidate.load_key}
    is_loaded = view.table.is_loaded(live)
    load_first = np.where(is_loaded, 0.0, load)
    load_again = (1 - view.estimates.fits) * load
    seconds: FloatArray = probe + load_first + load_again
    return seconds


def expected_seconds(view: TrialView) -> tuple[FloatArray, FloatArray]:
    """Return the expected seconds of every candidate's probe, and of its load. Requires a
    measurement.
    """
    return _probe_seconds(view), _load_seconds(view.table, view.completed)


def _probe_seconds(view: TrialView) -> FloatArray:
    """Median seconds of a probe times the candidate's expected slowdown."""
    seconds = []
    for trial in view.probes or view.completed[-1:]:
        cost = trial.measurement.cost
        seconds.append(cost.total_seconds - cost.load_seconds)
    usual_seconds = max(statistics.median(seconds), MIN_PROBE_SECONDS)

    speeds = []
    for trial in view.completed:
        speed = trial.measurement.ranking_speed
        if speed is not None:
            speeds.append(speed.tokens_per_second)
    if not speeds:
        return np.full(len(view.table), usual_seconds)
    usual_log_speed = np.log(statistics.median(speeds))
    log_slowdown = usual_log_speed - view.estimates.speed.mean
    return np.asarray(usual_seconds * np.exp(log_slowdown))


def _load_seconds(
    table: CandidateTable,
    trials: Sequence[Trial],
) -> FloatArray:
    """Median seconds of the measured loads that share the most settings with the candidate's
    load; 0 where nothing that was measured had to load.
    """
    loads = []
    for trial in trials:
        load_seconds = trial.measurement.cost.load_seconds
        if load_seconds > 0:
            loads.append((settings_of_load(trial.candidate), load_seconds))
    by_load = np.zeros(len(table.load_settings))
    if loads:
        for number, settings in enumerate(table.load_settings):
            by_load[number] = _most_similar_seconds(settings, loads)
    return by_load[table.loads]


def _most_similar_seconds(
    settings: frozenset[LoadSetting], loads: Sequence[tuple[frozenset[LoadSetting], float]]
) -> float:
    """Return the median seconds of the loads with the most equal settings."""
    seconds_by_equality: dict[int, list[float]] = {}
    for loaded, load_seconds in loads:
        equal_settings = len(settings & loaded)
        seconds = seconds_by_equality.setdefault(equal_settings, [])
        seconds.append(load_seconds)
    most_equal = max(seconds_by_equality)
    return statistics.median(seconds_by_equality[most_equal])

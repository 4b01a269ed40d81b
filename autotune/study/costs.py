"""What measuring a candidate would take, learnt from what measuring the others took."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

import numpy as np

from autotune.candidate import Knobs
from autotune.recommendation import Trial
from autotune.study.beliefs import Beliefs
from autotune.study.table import Numbers, Table

LOAD = 3.0
"""Before any load was seen: how many probes it is likely to take as long as."""


def seconds_to_measure(table: Table, trials: Sequence[Trial], beliefs: Beliefs, live: Collection[str] = ()) -> Numbers:
    """By candidate: its cycles, a load where none like it stands ready, and one more where it may run out and take the rig along.

    `live` are the keys of the loads that stand ready; where none is named, that of the last probe.
    """
    if not trials:
        return np.ones(len(table))
    probing = _probing(trials, beliefs)
    loading = _loading(table, trials, float(np.median(probing)))
    ready = live or {one.candidate.load_key for one in trials[-1:] if not one.measurement.outcome.is_out_of_memory}
    stands = np.isin(table.loads, [table.load_number[key] for key in ready if key in table.load_number])
    return np.asarray(probing + np.where(stands, 0.0, loading) + (1 - beliefs.fits) * loading)


def _probing(trials: Sequence[Trial], beliefs: Beliefs) -> Numbers:
    """Cycles of one size take the longer the slower a candidate is believed to be."""
    costs = [trial.measurement.cost for trial in trials if trial.purpose != "confirm"] or [trials[-1].measurement.cost]
    usual = max(statistics.median(cost.total_seconds - cost.load_seconds for cost in costs), 1e-3)
    rates = [trial.measurement.ranking_speed for trial in trials]
    known = [rate.tokens_per_second for rate in rates if rate is not None]
    if not known:
        return np.full(len(beliefs.fits), usual)
    slower = np.log(statistics.median(known)) - beliefs.speed.mean
    return np.asarray(usual * np.exp(np.clip(slower, -1.0, 1.0)))


def _loading(table: Table, trials: Sequence[Trial], probe: float) -> Numbers:
    """As long as the loads most like it took."""
    took: dict[str, tuple[Knobs, list[float]]] = {}
    for trial in trials:
        if trial.measurement.cost.load_seconds > 0:
            took.setdefault(trial.candidate.load_key, (trial.candidate.load, []))[1].append(trial.measurement.cost.load_seconds)
    by_load = np.empty(len(table.load_examples))
    for number, one in table.load_examples.items():
        alike = [(sum(load.get(name) == value for name, value in one.load.items()), many) for load, many in took.values()]
        most = max((count for count, _ in alike), default=0)
        nearest = [seconds for count, many in alike if count == most for seconds in many]
        by_load[number] = statistics.median(nearest) if nearest else LOAD * probe
    return np.asarray(by_load[table.loads])

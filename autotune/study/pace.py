"""Speed by the phases of a cycle: what the rollout of one candidate was off by tells of others' rollouts, and so for training.

A micro-batch changes nothing about the engine, and an engine's share nothing about the backward pass. So each phase's seconds
are corrected apart, and the cycle is their sum.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from autotune.measurement import Phase, Speed
from autotune.prediction import Estimate, Prediction
from autotune.recommendation import Trial
from autotune.study.regression import Kernels, Observed, Posterior, Regression
from autotune.study.table import Numbers, Places, Table

GROUPS: Mapping[str, tuple[Phase, ...]] = {
    "rollout": ("rollout",),
    "sync": ("sync",),
    "training": ("score", "forward", "backward"),
}
"""What is corrected together; whatever else there is of a cycle is the rest, and taken as predicted until it was measured."""

REST = "rest"
WIDTH = 3.28
"""Standard deviations between the ends of a prediction's interval."""

LEAST, MOST = 0.15, 1.0
"""No phase is believed to be predicted better or worse than this, as a logarithm."""

STRUCTURES = ((0.9, 0.08, 0.015, 0.005), (0.7, 0.25, 0.04, 0.01), (0.4, 0.45, 0.12, 0.03))
"""Most of what one phase is off by is common to all candidates."""

CLIFF = 3.0
"""A phase that takes so many times as long as predicted, and is so many standard deviations off, fell off a cliff: a cache that
holds one sequence at a time, say. That belongs to what was loaded, and says nothing of other loads."""

NOISE = (0.01, 0.03, 0.07)
"""How far two measurements of one candidate may lie apart; which of these it is shows itself."""

USUAL, BEYOND_CYCLES = 0.03, 3.0
"""A probe is a mean of cycles: where these are steady, it is hardly off by more than the first, nor by more than so many times
what single cycles scatter by. A larger difference that no prediction explains is one, and not a noise."""

SHORTEST = 1e-4
"""Of a cycle's seconds: a phase that is shorter says nothing."""


class Pace:
    """Predicted seconds by phase, corrected by measured ones."""

    def __init__(self, table: Table, found: Sequence[Prediction | None]) -> None:
        self._table = table
        # One without a prediction (a baseline that cannot be followed) is taken to be as the middle of the others.
        self._seconds = {name: _filled(found, partial(_seconds_of, name)) for name in (*GROUPS, REST)}
        self._widths = {
            name: np.array([MOST if one is None else _width(_together(one, name)) for one in found]) for name in GROUPS
        }
        self._widths[REST] = np.full(len(found), MOST)
        kernels = {name: Kernels(table, table.kinds, _figures(seconds)) for name, seconds in self._seconds.items()}
        self._regressions = {name: Regression(kernels[name], width, NOISE, STRUCTURES) for name, width in self._widths.items()}
        self._tokens = _filled(found, _rate) * sum(self._seconds.values())

    @classmethod
    def knows(cls, found: Sequence[Prediction | None]) -> bool:
        """Whether cycles were predicted phase by phase, wherever they were predicted."""
        known = [one for one in found if one is not None]
        return bool(known) and all(one.tokens_per_second is not None and _timed(one) for one in known)

    def after(self, trials: Sequence[Trial], pending: Places) -> Posterior:
        """Of the logarithm of tokens per second."""
        seen = {place: cycle for trial in trials if (cycle := self._cycle(trial)) for place in [cycle[0]]}
        noises = _believable(trials)
        parts = {name: self._corrected(name, list(seen.values()), noises, pending) for name in self._seconds}
        corrected = {name: seconds * np.exp(parts[name].mean) for name, seconds in self._seconds.items()}
        total = np.asarray(sum(corrected.values()))
        weights = {name: seconds / total for name, seconds in corrected.items()}
        variance = sum((weights[name] * found.deviation) ** 2 for name, found in parts.items())

        def shared(place: int) -> Numbers:
            """Phases are off by figures of their own, so the covariance of cycles is the sum of theirs."""
            return np.asarray(sum(weights[name] * weights[name][place] * parts[name].shared(place) for name in parts))

        noise = min(parts["rollout"].noise, parts["training"].noise)
        return Posterior(np.log(self._tokens / total), np.maximum(np.sqrt(variance), 1e-3), noise, shared)

    def _cycle(self, trial: Trial) -> tuple[int, Mapping[str, float]] | None:
        """Measured seconds of one cycle by phase."""
        place, speed = self._table.place.get(trial.candidate.id), trial.measurement.ranking_speed
        if place is None or speed is None or speed.tokens_per_second <= 0 or not speed.phase_seconds:
            return None
        return place, _split(speed, self._tokens[place] / speed.tokens_per_second)

    def _corrected(
        self, name: str, seen: Sequence[tuple[int, Mapping[str, float]]], noises: tuple[float, ...], pending: Places
    ) -> Posterior:
        seconds = self._seconds[name]
        rows = [
            (place, math.log(parts[name] / seconds[place]))
            for place, parts in seen
            if min(parts[name], seconds[place]) > SHORTEST * sum(parts.values())
        ]
        places, off = np.array([place for place, _ in rows], dtype=np.int64), np.array([off for _, off in rows])
        fell = off > np.maximum(math.log(CLIFF), CLIFF * self._widths[name][places])
        usual = Observed(places[~fell], off[~fell], np.zeros(int((~fell).sum())))
        found = self._regressions[name].after(usual, pending, noises)
        return self._with_cliffs(found, places[~fell], places[fell], off[fell])

    def _with_cliffs(self, found: Posterior, usual: Places, fallen: Places, off: Numbers) -> Posterior:
        """Whoever has the load of one that fell off a cliff is taken to have fallen too, unless it was seen not to."""
        mean, loads = found.mean.copy(), self._table.loads
        seen = np.isin(np.arange(len(mean)), usual)
        for place, distance in zip(fallen, off, strict=True):
            mean[(loads == loads[place]) & ~seen] = distance
            mean[place] = distance
        return replace(found, mean=mean)


def _believable(trials: Sequence[Trial]) -> tuple[float, ...]:
    """Of the noises, those that the measured cycles leave room for."""
    scatter = usual_scatter(trials)
    return tuple(noise for noise in NOISE if scatter is None or noise <= max(USUAL, BEYOND_CYCLES * scatter))


def usual_scatter(trials: Iterable[Trial]) -> float | None:
    """How much single cycles scatter within the probes so far; None while that is not known."""
    speeds = [speed for trial in trials if (speed := trial.measurement.ranking_speed) is not None]
    inside = [scatter for speed in speeds if (scatter := speed.scatter) is not None]
    return statistics.median(inside) if inside else None


def _split(speed: Speed, cycle: float) -> Mapping[str, float]:
    """A cycle's seconds by group, in the shares of all timed cycles."""
    whole = sum(speed.phase_seconds.values())
    parts = {name: sum(speed.phase_seconds.get(phase, 0.0) for phase in phases) for name, phases in GROUPS.items()}
    parts[REST] = max(0.0, whole - sum(parts.values()))
    return {name: seconds / whole * cycle for name, seconds in parts.items()}


def _filled(found: Sequence[Prediction | None], figure: Callable[[Prediction], float]) -> Numbers:
    """A figure of each prediction; of who has none, the middle of all."""
    known = [figure(one) for one in found if one is not None]
    middle = statistics.median(known)
    return np.array([middle if one is None else figure(one) for one in found])


def _seconds_of(name: str, one: Prediction) -> float:
    return _together(one, name).value


def _rate(one: Prediction) -> float:
    assert one.tokens_per_second is not None
    return one.tokens_per_second.value


def _figures(seconds: Numbers) -> Numbers | None:
    """What takes no time anywhere was not predicted."""
    return np.log(np.maximum(seconds, seconds.max() * SHORTEST)) if seconds.max() > 0 else None


def _timed(one: Prediction) -> bool:
    return any(phase.seconds is not None for phase in one.phases)


def _together(one: Prediction, name: str) -> Estimate:
    """The predicted seconds of a group; a rest that nobody predicted takes no time."""
    named = {phase for phases in GROUPS.values() for phase in phases}
    found = Estimate.exactly(0.0)
    for phase in one.phases:
        mine = phase.name in GROUPS[name] if name in GROUPS else phase.name not in named
        if mine and phase.seconds is not None:
            found += phase.seconds
    return found


def _width(one: Estimate) -> float:
    if one.value <= 0:
        return LEAST
    return min(MOST, max(LEAST, math.log(max(one.high, one.value) / max(one.low, one.value / 20)) / WIDTH))

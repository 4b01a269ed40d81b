"""How much memory each candidate needs, as a share of the limit, by the stretches of a cycle in which its peak may lie.

An engine that is awake during the rollout and what training keeps for its backward pass have different errors, so each stretch
is corrected apart by the peaks measured there; a candidate fits where all of them do. What an engine takes that no batch moves
is off by the same whatever the batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.measurement import Measurement, Phase
from autotune.prediction import Estimate, Prediction
from autotune.recommendation import Trial
from autotune.study.facts import blames_engine
from autotune.study.gauss import WIDTH, below
from autotune.study.regression import Kernels, Observed, Posterior, Regression, posterior
from autotune.study.table import Flags, Numbers, Places, Table

STRETCHES: Mapping[str, tuple[Phase, ...]] = {
    "loading": ("load",),
    "rollout": ("rollout", "sync"),
    "training": ("reward", "score", "forward", "backward", "optimizer"),
}
WHOLE: Mapping[str, tuple[Phase, ...]] = {"cycle": tuple(phase for phases in STRETCHES.values() for phase in phases)}
"""Where nothing was predicted by phase."""

LEAST = 0.08
"""No prediction is believed to be nearer than this, as a share."""

GUESSED = 0.7
"""Standard deviation of what nothing was predicted for, around half of the limit."""

HALF = math.log(0.5)

STEP = 0.1
"""Without predictions: what a doubling of something that takes memory adds to the need."""

NOISE = (0.004, 0.02)
"""How far two measurements of one candidate may lie apart; which of these it is shows itself."""

PASSED = 1.005
"""What ran out of memory needs more than the limit by at least this."""

HELD = 0.01
"""The spread that is left in a bound, at least."""


@dataclass(frozen=True)
class Needs:
    """By candidate of the table."""

    peak: Posterior
    """Of the logarithm of the peak over the limit: below 0 it fits."""

    fits: Numbers
    """The chance that no stretch needs more than the limit."""

    least: Numbers
    """The lower end of what is believed of the most demanding stretch."""


@dataclass(frozen=True)
class _Stretch:
    phases: tuple[Phase, ...]
    prior: Numbers
    width: Numbers


class Appetite:
    """Predicted peaks, corrected by measured ones."""

    def __init__(self, table: Table, found: Sequence[Prediction | None], limit_bytes: int) -> None:
        self._table, self._limit_bytes = table, limit_bytes
        known = [one for one in found if one is not None]
        by_phase = bool(known) and all(one.phases for one in known)
        told = np.array([one is not None for one in found], dtype=bool)
        guessed = np.where(told, 0.0, STEP * table.steps)
        self._stretches = {
            name: _stretch(phases, [_peak(one, phases, by_phase, limit_bytes) for one in found], guessed)
            for name, phases in (STRETCHES if by_phase else WHOLE).items()
        }
        self._kernels = {
            name: Kernels(table, figures=_figures(one.prior, told) if by_phase else None) for name, one in self._stretches.items()
        }
        self._regressions = {name: Regression(self._kernels[name], one.width, NOISE) for name, one in self._stretches.items()}

    def after(self, trials: Sequence[Trial], pending: Places) -> Needs:
        seen = [(place, trial.measurement) for trial in trials if (place := self._heard(trial)) is not None]
        found = [self._corrected(name, seen, pending) for name in self._stretches]
        means = np.array([one.mean for one in found])
        spreads = np.array([one.deviation for one in found])
        highest = means.argmax(axis=0)
        everyone = np.arange(means.shape[1])
        peak = Posterior(means[highest, everyone], spreads[highest, everyone], statistics.fmean(one.noise for one in found))
        fits = np.prod(below(-means / spreads), axis=0)
        return Needs(peak=peak, fits=fits, least=np.asarray((means - WIDTH * spreads).max(axis=0)))

    def _heard(self, trial: Trial) -> int | None:
        """Its place, where the outcome tells of its need."""
        return None if blames_engine(trial.measurement) else self._table.place.get(trial.candidate.id)

    def _corrected(self, name: str, seen: Sequence[tuple[int, Measurement]], pending: Places) -> Posterior:
        one = self._stretches[name]
        exact, bounds = [], []
        for place, measured in seen:
            if measured.outcome.is_out_of_memory:
                if self._ended_in(place, measured) == name:
                    bounds.append((place, math.log(least_need(measured) / self._limit_bytes) - one.prior[place]))
            elif measured.worst is not None and (reached := self._reached(name, place, measured)):
                exact.append((place, math.log(reached / self._limit_bytes) - one.prior[place]))
        known = _observed(exact)
        if bounds:
            known = _with_bounds(known, bounds, posterior(self._kernels[name], one.width, known, NOISE))
        found = self._regressions[name].after(known, pending)
        return replace(found, mean=found.mean + one.prior, deviation=np.maximum(found.deviation, 1e-3))

    def _reached(self, name: str, place: int, measured: Measurement) -> int | None:
        """The peak measured in the stretch; where phases were not told apart, the whole is that of the most demanding one."""
        by_phase = measured.memory.phase_peak_bytes
        here = [by_phase[phase] for phase in self._stretches[name].phases if phase in by_phase]
        if here:
            return max(here)
        return measured.memory.peak_bytes if not by_phase and name == self._most_demanding(place) else None

    def _ended_in(self, place: int, measured: Measurement) -> str:
        phase = measured.failure.phase if measured.failure else None
        return next((name for name, one in self._stretches.items() if phase in one.phases), self._most_demanding(place))

    def _most_demanding(self, place: int) -> str:
        return max(self._stretches, key=lambda name: float(self._stretches[name].prior[place]))


def least_need(measurement: Measurement) -> float:
    """Bytes that a candidate that ran out needs at the very least: a number in the error's message is a measurement."""
    memory = measurement.memory
    asked = measurement.failure.numbers.get("asked_bytes", 0) if measurement.failure else 0
    reached = (memory.peak_bytes or 0) + asked
    return max(reached, memory.limit_bytes * PASSED)


def _stretch(phases: tuple[Phase, ...], shares: Sequence[Estimate | None], guessed: Numbers) -> _Stretch:
    prior = np.array([HALF if one is None else math.log(one.value) for one in shares])
    width = np.array([GUESSED if one is None else max(LEAST, _width(one)) for one in shares])
    return _Stretch(phases, prior + guessed, width)


def _peak(one: Prediction | None, phases: tuple[Phase, ...], by_phase: bool, limit_bytes: int) -> Estimate | None:
    """Predicted, as a share of the limit; a stretch without a phase of its own needs hardly anything."""
    if one is None or one.peak_memory_bytes.value <= 0:
        return None
    peaks = [phase.peak_bytes for phase in one.phases if phase.name in phases] if by_phase else [one.peak_memory_bytes]
    highest = max(peaks, key=lambda peak: peak.value, default=one.peak_memory_bytes.scaled(0.1))
    return highest.scaled(1 / limit_bytes)


def _figures(prior: Numbers, told: Flags) -> Numbers:
    """Which knobs move a stretch, its predictions show; one that nobody predicted is put in the middle of the others."""
    return np.where(told, prior, np.median(prior[told]))


def _width(one: Estimate) -> float:
    return math.log(one.high / max(one.low, one.value / 20)) / (2 * WIDTH)


def _observed(rows: Sequence[tuple[int, float]]) -> Observed:
    places = np.array([place for place, _ in rows], dtype=np.int64)
    return Observed(places, np.array([distance for _, distance in rows]), np.zeros(len(rows)))


def _with_bounds(known: Observed, bounds: Sequence[tuple[int, float]], found: Posterior) -> Observed:
    """A bound enters as the value to expect above it, with the spread that is left there."""
    places = np.array([place for place, _ in bounds], dtype=np.int64)
    bound = np.array([distance for _, distance in bounds])
    mean, deviation = found.mean[places], np.maximum(found.deviation[places], HELD)
    start = (bound - mean) / deviation
    density = np.exp(-0.5 * start**2) / math.sqrt(2 * math.pi)
    above = np.maximum(below(-start), 1e-9)
    ratio = np.where(start > 5, start, density / above)
    expected = np.maximum(mean + deviation * ratio, bound)
    variance = np.maximum(deviation**2 * (1 + start * ratio - ratio**2), HELD**2)
    return Observed(
        np.concatenate([known.places, places]),
        np.concatenate([known.distance, expected]),
        np.concatenate([known.variance, variance]),
    )

"""What is believed of every candidate before it is measured: its memory, its speed, and what measuring it would cost.

The prior is the prediction where there is one, with the width of its interval, and a wide guess where there is none
(on a CPU). Everything measured corrects it, so the tenth probe is chosen by a model that has seen this machine.
Nothing here is ever told as a measurement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.measurement import Measurement
from autotune.prediction import Estimate, Prediction
from autotune.recommendation import Trial
from autotune.study.facts import Facts, blames_engine, facts_of
from autotune.study.options import SearchOptions
from autotune.study.regression import Kernels, Observed, Posterior, posterior
from autotune.study.table import Flags, Numbers, Table

WIDTH = 1.64
"""An interval's bounds lie so many standard deviations from its value: one truth in ten lies outside."""

LEAST_MEMORY, LEAST_SPEED = 0.06, 0.15
"""No prediction is believed to be nearer than this, as a share."""

GUESSED_MEMORY, GUESSED_SPEED = 0.7, 0.6
"""Standard deviation of what nothing was predicted for, around half of the limit, and around what was measured."""

HALF = math.log(0.5)

MEMORY_STEP, SPEED_STEP = 0.1, 0.07
"""Without predictions: what a doubling of something that takes memory adds to the need, and what that memory buys in speed."""

MEMORY_NOISE, SPEED_NOISE = (0.004, 0.02), (0.01, 0.03, 0.07)
"""How far two measurements of one candidate may lie apart; which of these it is shows itself."""


@dataclass(frozen=True)
class Beliefs:
    """By candidate of the table."""

    facts: Facts
    need: Posterior
    """Of the logarithm of the peak over the limit: below 0 it fits."""

    speed: Posterior
    """Of the logarithm of tokens per second."""

    fits: Numbers
    """Probability of fitting; 0 and 1 only where facts settle it."""

    refused: Flags
    """Beyond the limit even by the lower end of the corrected prediction: not worth a measurement."""


class Mind:
    """Holds the priors, and derives what is believed anew from the trials each time: a resumed study believes the same."""

    def __init__(self, table: Table, predictions: Mapping[str, Prediction], *, limit_bytes: int, options: SearchOptions) -> None:
        self.table, self.options, self._limit_bytes = table, options, limit_bytes
        self.predicted = table.mask(predictions)
        self._kernels = Kernels(table)
        found = [predictions.get(one.id) for one in table.candidates]
        self._fails = np.array([one is not None and one.failure is not None and one.fits is False for one in found], dtype=bool)
        self._need, self._need_width = _priors([_share(one, limit_bytes) for one in found], HALF, LEAST_MEMORY, GUESSED_MEMORY)
        rates = [None if one is None else one.tokens_per_second for one in found]
        self._speed, self._speed_width = _priors(rates, None, LEAST_SPEED, GUESSED_SPEED)
        self._knows_speed = np.array([rate is not None for rate in rates], dtype=bool)
        self._need += np.where(self.predicted, 0.0, MEMORY_STEP * table.steps)
        self._speed += np.where(self._knows_speed, 0.0, SPEED_STEP * table.steps)
        self._last: tuple[int, Beliefs] | None = None

    def after(self, trials: Sequence[Trial]) -> Beliefs:
        """What is believed after these; asked again for as many, the same answer at once."""
        if self._last is None or self._last[0] != len(trials):
            self._last = (len(trials), self._believe(trials))
        return self._last[1]

    def _believe(self, trials: Sequence[Trial]) -> Beliefs:
        facts = facts_of(self.table, trials if self.options.imply else ())
        heard = trials if self.options.calibrate else ()
        need, speed = self._needs(heard), self._speeds(heard)
        fits = _below(-need.mean / need.deviation)
        fits = np.where(self._fails, np.minimum(fits, 0.01), fits)
        fits = np.where(facts.impossible, 0.0, np.where(facts.possible, 1.0, fits))
        # What comes nearest to fitting is refused only where even the lower end of what is believed lies beyond the limit.
        beyond = need.mean - WIDTH * need.deviation > 0
        refused = self.predicted & (beyond | self._fails) & ~facts.possible & self.options.screen
        return Beliefs(facts=facts, need=need, speed=speed, fits=fits, refused=refused)

    def _needs(self, trials: Sequence[Trial]) -> Posterior:
        """Peaks as measured; an out-of-memory error says that the need is above what was reached, and by what was asked for."""
        exact, bounds = [], []
        for trial in trials:
            place, memory = self.table.place.get(trial.candidate.id), trial.measurement.memory
            if place is None or blames_engine(trial.measurement):
                continue
            if trial.measurement.outcome.is_out_of_memory:
                bounds.append((place, math.log(least_need(trial.measurement) / self._limit_bytes) - self._need[place]))
            elif memory.peak_bytes and trial.measurement.worst is not None:
                exact.append((place, math.log(memory.peak_bytes / self._limit_bytes) - self._need[place]))
        known = _observed(exact)
        found = posterior(self._kernels, self._need_width, known, MEMORY_NOISE)
        if bounds:
            found = posterior(self._kernels, self._need_width, _with_bounds(known, bounds, found), MEMORY_NOISE)
        return Posterior(found.mean + self._need, np.maximum(found.deviation, 1e-3), found.noise)

    def _speeds(self, trials: Sequence[Trial]) -> Posterior:
        rates: dict[int, list[tuple[float, int]]] = {}
        for trial in trials:
            place, speed = self.table.place.get(trial.candidate.id), trial.measurement.ranking_speed
            if place is not None and speed is not None and speed.tokens_per_second > 0:
                rates.setdefault(place, []).append((math.log(speed.tokens_per_second), len(speed.cycle_seconds)))
        seen = [(place, statistics.fmean(rate for rate, _ in many)) for place, many in rates.items()]
        prior = self._speed
        if seen and not self._knows_speed.all():
            # Where no speed was predicted, what was measured says around which the others lie.
            guessed = [rate - prior[place] for place, rate in seen if not self._knows_speed[place]]
            prior = np.where(self._knows_speed, prior, prior + statistics.fmean(guessed or [0.0]))
        distances = [(place, rate - prior[place]) for place, rate in seen]
        found = posterior(self._kernels, self._speed_width, _observed(distances), SPEED_NOISE)
        return Posterior(found.mean + prior, np.maximum(found.deviation, 1e-3), found.noise)


def least_need(measurement: Measurement) -> float:
    """Bytes that a candidate that ran out needs at the very least: a number in the error's message is a measurement."""
    memory = measurement.memory
    asked = measurement.failure.numbers.get("asked_bytes", 0) if measurement.failure else 0
    reached = (memory.peak_bytes or 0) + asked
    return max(reached, memory.limit_bytes * 1.005)


def _share(prediction: Prediction | None, limit_bytes: int) -> Estimate | None:
    return None if prediction is None else prediction.peak_memory_bytes.scaled(1 / limit_bytes)


def _priors(found: Sequence[Estimate | None], centre: float | None, least: float, guessed: float) -> tuple[Numbers, Numbers]:
    """Logarithms of what was predicted, and how far they may be off."""
    known = [math.log(one.value) for one in found if one is not None and one.value > 0]
    middle = centre if centre is not None else (statistics.fmean(known) if known else 0.0)
    means = np.array([middle if one is None or one.value <= 0 else math.log(one.value) for one in found])
    widths = np.array([guessed if one is None or one.value <= 0 else max(_width(one), least) for one in found])
    return means, widths


def _width(one: Estimate) -> float:
    return math.log(one.high / max(one.low, one.value / 20)) / (2 * WIDTH)


def _observed(rows: Sequence[tuple[int, float]]) -> Observed:
    places = np.array([place for place, _ in rows], dtype=np.int64)
    return Observed(places, np.array([distance for _, distance in rows]), np.zeros(len(rows)))


def _with_bounds(known: Observed, bounds: Sequence[tuple[int, float]], found: Posterior) -> Observed:
    """A bound enters as the value to expect above it, with the spread that is left there."""
    places = np.array([place for place, _ in bounds], dtype=np.int64)
    bound = np.array([distance for _, distance in bounds])
    mean, deviation = found.mean[places], np.maximum(found.deviation[places], 0.01)
    start = (bound - mean) / deviation
    density = np.exp(-0.5 * start**2) / math.sqrt(2 * math.pi)
    above = np.maximum(_below(-start), 1e-9)
    ratio = np.where(start > 5, start, density / above)
    expected = np.maximum(mean + deviation * ratio, bound)
    variance = np.maximum(deviation**2 * (1 + start * ratio - ratio**2), 0.01**2)
    return Observed(
        np.concatenate([known.places, places]),
        np.concatenate([known.distance, expected]),
        np.concatenate([known.variance, variance]),
    )


_erf = np.vectorize(math.erf, otypes=[float])


def _below(numbers: Numbers) -> Numbers:
    """The share of a normal distribution below so many deviations."""
    return np.asarray(0.5 * (1 + _erf(numbers / math.sqrt(2))))


def expected_gain(mean: Numbers, deviation: Numbers, best: float) -> Numbers:
    """By how much a value is expected to exceed the best, counting only where it does."""
    apart = (mean - best) / deviation
    density = np.exp(-0.5 * apart**2) / math.sqrt(2 * math.pi)
    return np.asarray((mean - best) * _below(apart) + deviation * density)

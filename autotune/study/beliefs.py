"""What is believed of every candidate before it is measured: its memory, its speed, and what measuring it would cost.

The prior is the prediction where there is one, with the width of its interval, and a wide guess where there is none
(on a CPU). Everything measured corrects it, so the tenth probe is chosen by a model that has seen this machine.
Nothing here is ever told as a measurement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.prediction import Estimate, Prediction
from autotune.recommendation import Trial
from autotune.study.facts import Facts, Settled
from autotune.study.gauss import WIDTH
from autotune.study.needs import Appetite
from autotune.study.options import SearchOptions
from autotune.study.pace import Pace
from autotune.study.regression import Kernels, Observed, Posterior, Regression
from autotune.study.table import Flags, Numbers, Places, Table

LEAST_SPEED = 0.15
"""No prediction is believed to be nearer than this, as a share."""

GUESSED_SPEED = 0.6
"""Standard deviation of what nothing was predicted for, around what was measured."""

SPEED_STEP = 0.07
"""Without predictions: what the memory of one doubling buys in speed."""

SPEED_NOISE = (0.01, 0.03, 0.07)
"""How far two measurements of one candidate may lie apart; which of these it is shows itself."""

REMEMBERED = 32
"""So many measurements, the newest, correct what is believed of the others: what it takes to think grows with their cube, and a
search has long moved to where the newest are. What an outcome settles for good is never forgotten."""

CROWD = 8
"""For every so many that are pending, one outcome may go unheard for a while: among so many, one more would hardly change what
comes next, and to think everything over takes as long as for the first. What it settles for good is heard at once."""

FAILS = 0.01
"""The chance of fitting that is left to what is predicted to be refused by the engine itself."""


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
        self.table, self.options = table, options
        self.predicted = table.mask(predictions)
        self._settled = Settled(table)
        found = [predictions.get(one.id) for one in table.candidates]
        self._appetite = Appetite(table, found, limit_bytes)
        self._pace = Pace(table, found) if Pace.knows(found) else _WholeCycles(table, found)
        self._fails = np.array([one is not None and one.failure is not None and one.fits is False for one in found], dtype=bool)
        self._last: tuple[tuple[int, frozenset[str]], Beliefs] | None = None

    @property
    def screens(self) -> bool:
        """Whether anything could be refused for what is predicted of it."""
        return self.options.screen and bool(self.predicted.any())

    def settled(self, trials: Sequence[Trial]) -> Facts:
        """What the outcomes settle for good."""
        return self._settled.after(trials if self.options.imply else ())

    def after(self, trials: Sequence[Trial], pending: frozenset[str] = frozenset()) -> Beliefs:
        """What is believed after these; asked again for as many, the same answer at once. Those that are `pending` are taken to
        turn out as expected, so that the next to be chosen is not just more of the same."""
        key = (len(trials), pending)
        if self._last is None or self._last[0] != key:
            self._last = (key, self._believe(trials, pending))
        return self._last[1]

    def _believe(self, trials: Sequence[Trial], pending: frozenset[str]) -> Beliefs:
        facts, late = self.settled(trials), len(trials) % (1 + len(pending) // CROWD)
        heard = trials[: len(trials) - late] if self.options.calibrate else ()
        expected = self.table.mask([*pending, *(one.candidate.id for one in trials[len(trials) - late :])])
        newest, awaited = heard[-REMEMBERED:], np.flatnonzero(expected)
        needs, speed = self._appetite.after(newest, awaited), self._pace.after(newest, awaited)
        fits = np.where(self._fails, np.minimum(needs.fits, FAILS), needs.fits)
        fits = np.where(facts.impossible, 0.0, np.where(facts.possible, 1.0, fits))
        # What comes nearest to fitting is refused only where even the lower end of what is believed lies beyond the limit.
        refused = self.predicted & ((needs.least > 0) | self._fails) & ~facts.possible & self.options.screen
        return Beliefs(facts=facts, need=needs.peak, speed=speed, fits=fits, refused=refused)


class _WholeCycles:
    """Speed where it was not predicted by phase, or not at all: one figure for a cycle."""

    def __init__(self, table: Table, found: Sequence[Prediction | None]) -> None:
        self._table = table
        rates = [None if one is None else one.tokens_per_second for one in found]
        self._known = np.array([rate is not None for rate in rates], dtype=bool)
        known = [math.log(rate.value) for rate in rates if rate is not None]
        middle = statistics.fmean(known) if known else 0.0
        self._prior = np.array([middle if rate is None else math.log(rate.value) for rate in rates])
        self._prior += np.where(self._known, 0.0, SPEED_STEP * table.steps)
        width = np.array([GUESSED_SPEED if rate is None else max(_width(rate), LEAST_SPEED) for rate in rates])
        self._regression = Regression(Kernels(table), width, SPEED_NOISE)

    def after(self, trials: Sequence[Trial], pending: Places) -> Posterior:
        rates: dict[int, list[float]] = {}
        for trial in trials:
            place, speed = self._table.place.get(trial.candidate.id), trial.measurement.ranking_speed
            if place is not None and speed is not None and speed.tokens_per_second > 0:
                rates.setdefault(place, []).append(math.log(speed.tokens_per_second))
        seen = [(place, statistics.fmean(many)) for place, many in rates.items()]
        prior = self._prior
        if seen and not self._known.all():
            # Where no speed was predicted, what was measured says around which the others lie.
            guessed = [rate - prior[place] for place, rate in seen if not self._known[place]]
            prior = np.where(self._known, prior, prior + statistics.fmean(guessed or [0.0]))
        places = np.array([place for place, _ in seen], dtype=np.int64)
        distances = np.array([rate - prior[place] for place, rate in seen])
        observed = Observed(places, distances, np.zeros(len(seen)))
        found = self._regression.after(observed, pending)
        return replace(found, mean=found.mean + prior, deviation=np.maximum(found.deviation, 1e-3))


def _width(one: Estimate) -> float:
    return math.log(one.high / max(one.low, one.value / 20)) / (2 * WIDTH)

"""Estimates of memory, speed and chance of fitting for every candidate, before it is measured.

The prior is the prediction with its interval, or a wide guess where there is none (on a CPU). Every
measurement updates it. An estimate is never reported as a measurement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.core.answer import Trial
from autotune.core.prediction import Prediction
from autotune.search.implications import Implications, Implied
from autotune.search.search_options import SearchOptions
from autotune.search.surrogate.candidate_table import BoolArray, CandidateTable, FloatArray, IndexArray
from autotune.search.surrogate.gaussian_process import Kernels, Observations, Posterior, Regression
from autotune.search.surrogate.memory_model import MemoryModel, interval_width
from autotune.search.surrogate.throughput_model import NOISE, ThroughputModel

MIN_SPEED_WIDTH = 0.15  # Lower bound of a predicted speed's standard deviation, as a share
UNPREDICTED_SPEED_WIDTH = 0.6  # Standard deviation of an unpredicted speed, around the measured ones
SPEED_PER_DOUBLING = 0.07  # Without predictions: logarithmic speed gained per doubling of memory
MAX_OBSERVATIONS = 32  # Newest measurements that the regression uses, since its time is cubic in their number
# Pending probes per outcome that may be excluded from the regression for a while: among this many, one more outcome hardly
# changes the next choice, and a full refit takes as long as the first. Implications are never delayed.
PENDING_PER_DELAYED = 8
REFUSED_CHANCE = 0.01  # Upper bound of the chance of fitting where the engine is predicted to refuse the candidate


@dataclass(frozen=True)
class Estimates:
    """Estimates by row of the table."""

    need: Posterior  # log(peak / limit): a candidate below 0 fits
    speed: Posterior  # log(tokens per second)
    fits: FloatArray  # Probability of fitting; 0 and 1 only by implication
    refused: BoolArray  # True if even the lower bound of the corrected prediction is above the limit


class SurrogateModel:
    """Priors, and the estimates that follow from them and the trials; a resumed study computes the same ones."""

    def __init__(
        self, table: CandidateTable, predictions: Mapping[str, Prediction], *, limit_bytes: int, options: SearchOptions
    ) -> None:
        self.table, self.options = table, options
        self.predicted = table.mask(predictions)
        self._implied = Implied(table)
        found = [predictions.get(one.id) for one in table.candidates]
        self._memory = MemoryModel(table, found, limit_bytes)
        self._speed = ThroughputModel(table, found) if ThroughputModel.has_phase_times(found) else _CycleModel(table, found)
        self._rejected = np.array(
            [one is not None and one.failure is not None and one.fits is False for one in found], dtype=bool
        )
        self._last: tuple[tuple[int, frozenset[str]], Estimates] | None = None

    @property
    def screens(self) -> bool:
        """True if predictions can rule candidates out."""
        return self.options.screen and bool(self.predicted.any())

    def implied(self, trials: Sequence[Trial]) -> Implications:
        return self._implied.after(trials if self.options.imply else ())

    def estimate(self, trials: Sequence[Trial], pending: frozenset[str] = frozenset()) -> Estimates:
        """Return the estimates after these trials. Pending ones count as ended as expected: the next is not more of the same."""
        key = (len(trials), pending)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        implications = self.implied(trials)
        used = len(trials) - len(trials) % (1 + len(pending) // PENDING_PER_DELAYED)
        observed = (trials[:used] if self.options.calibrate else ())[-MAX_OBSERVATIONS:]
        expected = np.flatnonzero(self.table.mask([*pending, *(one.candidate.id for one in trials[used:])]))
        memory, speed = self._memory.posterior(observed, expected), self._speed.posterior(observed, expected)
        fits = np.where(self._rejected, np.minimum(memory.fits, REFUSED_CHANCE), memory.fits)
        fits = np.where(implications.impossible, 0.0, np.where(implications.possible, 1.0, fits))
        refused = self.predicted & ((memory.lower > 0) | self._rejected) & ~implications.possible & self.options.screen
        found = Estimates(need=memory.peak, speed=speed, fits=fits, refused=refused)
        self._last = key, found
        return found


class _CycleModel:
    """Speed by one figure per cycle, where it was not predicted by phase, or not at all."""

    def __init__(self, table: CandidateTable, found: Sequence[Prediction | None]) -> None:
        self._table = table
        rates = [None if one is None else one.ranking_rate for one in found]
        self._known = np.array([rate is not None for rate in rates], dtype=bool)
        known = [math.log(rate.value) for rate in rates if rate is not None]
        middle = statistics.fmean(known) if known else 0.0
        self._prior = np.array([middle if rate is None else math.log(rate.value) for rate in rates])
        self._prior += np.where(self._known, 0.0, SPEED_PER_DOUBLING * table.steps)
        width = np.array(
            [UNPREDICTED_SPEED_WIDTH if rate is None else max(interval_width(rate), MIN_SPEED_WIDTH) for rate in rates]
        )
        self._regression = Regression(Kernels(table), width, NOISE)

    def posterior(self, trials: Sequence[Trial], pending: IndexArray) -> Posterior:
        rates: dict[int, list[float]] = {}
        for trial in trials:
            index, speed = self._table.index.get(trial.candidate.id), trial.measurement.ranking_speed
            if index is not None and speed is not None and speed.tokens_per_second > 0:
                rates.setdefault(index, []).append(math.log(speed.tokens_per_second))
        means = {index: statistics.fmean(many) for index, many in rates.items()}
        prior = self._prior
        if means and not self._known.all():
            # Unpredicted speeds are centred on the measured ones.
            offsets = [rate - prior[index] for index, rate in means.items() if not self._known[index]]
            prior = np.where(self._known, prior, prior + statistics.fmean(offsets or [0.0]))
        residual = np.array([rate - prior[index] for index, rate in means.items()])
        observed = Observations(np.array(list(means), dtype=np.int64), residual, np.zeros(len(means)))
        found = self._regression.posterior(observed, pending)
        return replace(found, mean=found.mean + prior, deviation=np.maximum(found.deviation, 1e-3))

"""Estimates of memory, speed and chance of fitting for every candidate, before it is measured.

The prior is the prediction with its interval, or a wide guess where there is none (on a CPU). Every
measurement updates it. An estimate is never reported as a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.core.answer import Trial
from autotune.core.prediction import Prediction
from autotune.search.surrogate.candidate_table import BoolArray, CandidateTable, FloatArray
from autotune.search.surrogate.gaussian_process import (
    Posterior,
)
from autotune.search.surrogate.memory_model import Implications, Implied, MemoryModel
from autotune.search.surrogate.throughput_model import CycleModel, ThroughputModel


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Switches; all on in normal use."""

    screen: bool = True  # Skip candidates that the corrected prediction rules out
    imply: bool = True  # Derive from an out-of-memory error that more demanding candidates fail too
    value_per_second: bool = True  # Divide expected gains by the cost of measuring them
    calibrate: bool = True  # Update the estimates of all candidates after each measurement
    prune: bool = True  # Stop a probe early once its candidate cannot become the best


MAX_OBSERVATIONS = (
    32  # Newest measurements that the regression uses, since its time is cubic in their number
)
# Pending probes per outcome that may be excluded from the regression for a while: among this many,
# one more outcome hardly changes the next choice, and a full refit takes as long as the first.
# Implications are never delayed.
PENDING_PER_DELAYED = 8
# Upper bound of the chance of fitting where the engine is predicted to refuse the candidate
REFUSED_CHANCE = 0.01


@dataclass(frozen=True)
class Estimates:
    """Estimates by row of the table."""

    need: Posterior  # log(peak / limit): a candidate below 0 fits
    speed: Posterior  # log(tokens per second)
    fits: FloatArray  # Probability of fitting; 0 and 1 only by implication
    refused: (
        BoolArray  # True if even the lower bound of the corrected prediction is above the limit
    )


class SurrogateModel:
    """Priors, and the estimates that follow from them and the trials; a resumed study computes
    the same ones.
    """

    def __init__(
        self,
        table: CandidateTable,
        predictions: Mapping[str, Prediction],
        *,
        limit_bytes: int,
        options: SearchOptions,
    ) -> None:
        self.table, self.options = table, options
        self.predicted = table.mask(predictions)
        self._implied = Implied(table)
        found = [predictions.get(one.id) for one in table.candidates]
        self._memory = MemoryModel(table, found, limit_bytes)
        self._speed = (
            ThroughputModel(table, found)
            if ThroughputModel.has_phase_times(found)
            else CycleModel(table, found)
        )
        self._rejected = np.array(
            [one is not None and one.failure is not None and one.fits is False for one in found],
            dtype=bool,
        )
        self._last: tuple[tuple[int, frozenset[str]], Estimates] | None = None

    @property
    def screens(self) -> bool:
        """True if predictions can rule candidates out."""
        return self.options.screen and bool(self.predicted.any())

    def implied(self, trials: Sequence[Trial]) -> Implications:
        return self._implied.after(trials if self.options.imply else ())

    def estimate(self, trials: Sequence[Trial], pending: frozenset[str] = frozenset()) -> Estimates:
        """Return the estimates after these trials. Pending ones count as ended as expected: the
        next is not more of the same.
        """
        key = (len(trials), pending)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        implications = self.implied(trials)
        used = len(trials) - len(trials) % (1 + len(pending) // PENDING_PER_DELAYED)
        observed = (trials[:used] if self.options.calibrate else ())[-MAX_OBSERVATIONS:]
        expected = np.flatnonzero(
            self.table.mask([*pending, *(one.candidate.id for one in trials[used:])])
        )
        need, fits, lower = self._memory.posterior(observed, expected)
        fits = np.where(self._rejected, np.minimum(fits, REFUSED_CHANCE), fits)
        fits = np.where(implications.impossible, 0.0, np.where(implications.possible, 1.0, fits))
        refused = (
            self.predicted
            & ((lower > 0) | self._rejected)
            & ~implications.possible
            & self.options.screen
        )
        speed = self._speed.posterior(observed, expected)
        found = Estimates(need=need, speed=speed, fits=fits, refused=refused)
        self._last = key, found
        return found

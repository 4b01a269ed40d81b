"""Estimates of memory, speed and chance of fitting for every candidate, before it is measured.

The prior is the prediction with its interval, or a wide guess where there is none (on a CPU). Every
measurement updates it. An estimate is never reported as a measurement.

What is certain precedes estimates: a candidate that a measured outcome rules out has the chance 0,
one that it proves to fit has the chance 1 (`implications`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.core.answer import Trial
from autotune.core.prediction import Prediction
from autotune.core.run_statistics import UNKNOWN_DEVIATION
from autotune.search.surrogate.candidate_table import BoolArray, CandidateTable, FloatArray
from autotune.search.surrogate.gaussian_process import Posterior
from autotune.search.surrogate.implications import Implications, Implied
from autotune.search.surrogate.memory_model import MemoryModel
from autotune.search.surrogate.throughput_model import CycleModel, ThroughputModel


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Switches; all on in normal use."""

    screen: bool = True  # Skip candidates that the corrected prediction rules out
    imply: bool = True  # Derive from an out-of-memory error that more demanding candidates fail too
    value_per_second: bool = True  # Divide expected gains by the cost of measuring them
    calibrate: bool = True  # Update the estimates of all candidates after each measurement
    prune: bool = True  # Stop a probe early once its candidate cannot become the best


# Newest measurements that the regression uses, since its time is cubic in their number
MAX_OBSERVATIONS = 32
# Pending probes per outcome that may be excluded from the regression for a while: among this many,
# one more outcome hardly changes the next choice, and a full refit takes as long as the first.
# Implications are never delayed.
PENDING_PER_DELAYED = 8
# Upper bound of the chance of fitting where the engine is predicted to refuse the candidate
REFUSED_CHANCE = 0.01


@dataclass(frozen=True)
class Estimates:
    """Estimates by row of the table."""

    # log(peak / usable memory): a candidate below 0 fits, and leaves the headroom free
    need: Posterior
    speed: Posterior  # log(tokens per second)
    fits: FloatArray  # Probability of fitting; 0 and 1 only by implication
    refused: BoolArray  # True if even the lower bound of the corrected prediction exceeds the limit


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
        headroom_bytes: int = 0,
    ) -> None:
        self.table = table
        self.limit_bytes = limit_bytes
        self.options = options
        self.predicted = table.mask(predictions)
        by_row = [predictions.get(candidate.id) for candidate in table.candidates]
        self._implied = Implied(table)
        self._memory = MemoryModel(table, by_row, limit_bytes - headroom_bytes)
        self._speed: ThroughputModel | CycleModel
        if ThroughputModel.has_phase_times(by_row):
            self._speed = ThroughputModel(table, by_row)
        else:
            self._speed = CycleModel(table, by_row)
        rejected = [_is_rejected_by_engine(prediction) for prediction in by_row]
        self._rejected_by_engine = np.array(rejected, dtype=bool)
        self._last: tuple[tuple[int, frozenset[str], float], Estimates] | None = None

    @property
    def screens(self) -> bool:
        """True if predictions can rule candidates out."""
        return self.options.screen and bool(self.predicted.any())

    def implied(self, trials: Sequence[Trial]) -> Implications:
        if not self.options.imply:
            return self._implied.after(())
        return self._implied.after(trials)

    def estimate(
        self,
        trials: Sequence[Trial],
        pending: frozenset[str] = frozenset(),
        speed_noise: float = UNKNOWN_DEVIATION,
    ) -> Estimates:
        """Return the estimates after these trials. Pending ones count as ended as expected: the
        next is not more of the same. `speed_noise`: standard deviation between two runs of a
        candidate.
        """
        key = (len(trials), pending, speed_noise)
        if self._last is None or self._last[0] != key:
            estimates = self._compute(trials, pending, speed_noise)
            self._last = key, estimates
        return self._last[1]

    def _compute(
        self,
        trials: Sequence[Trial],
        pending: frozenset[str],
        speed_noise: float,
    ) -> Estimates:
        # 1. The regression uses the newest outcomes. A delayed one counts as pending.
        implications = self.implied(trials)
        cycle = 1 + len(pending) // PENDING_PER_DELAYED
        delayed = len(trials) % cycle
        used = len(trials) - delayed
        observed: Sequence[Trial] = ()
        if self.options.calibrate:
            observed = trials[:used][-MAX_OBSERVATIONS:]
        delayed_ids = [trial.candidate.id for trial in trials[used:]]
        expected_mask = self.table.mask([*pending, *delayed_ids])
        expected = np.flatnonzero(expected_mask)

        # 2. Memory, overruled by the engine's own refusal, overruled by what is certain.
        need, fits, lower_bound = self._memory.posterior(observed, expected)
        rejected_fits = fits[self._rejected_by_engine]
        fits[self._rejected_by_engine] = np.minimum(rejected_fits, REFUSED_CHANCE)
        fits[implications.possible] = 1.0
        fits[implications.impossible] = 0.0
        refused = np.zeros(len(self.table), dtype=bool)
        if self.options.screen:
            cannot_fit = (lower_bound > 0) | self._rejected_by_engine
            refused = self.predicted & cannot_fit & ~implications.possible

        # 3. Speed.
        speed = self._speed.posterior(observed, expected, speed_noise)
        return Estimates(
            need=need,
            speed=speed,
            fits=fits,
            refused=refused,
        )


def _is_rejected_by_engine(prediction: Prediction | None) -> bool:
    if prediction is None:
        return False
    return prediction.failure is not None and prediction.fits is False

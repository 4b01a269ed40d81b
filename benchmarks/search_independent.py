"""Truth that is the prediction itself, with an independent error of each candidate.

No error is common to candidates, so a measurement says nothing about any other candidate. Some
candidates have larger errors than others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from search_simulator import Machine as Formulas
from search_simulator import Truth

from autotune.core.measurement import Phase
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate

SPEED_ERROR = 0.05
MEMORY_ERROR = 0.01
"""Standard deviations of the errors' logarithms, in the mean over candidates."""

LEAST, MOST = 0.2, 1.8
"""A candidate's own standard deviation, as a multiple of the mean one."""


@dataclass(frozen=True)
class Independent:
    """Machine in the place of the simulator's formulas; these give the seconds of a load."""

    formulas: Formulas
    predictions: Mapping[str, Prediction]
    seed: int
    limit_bytes: int

    @property
    def ranks(self) -> int:
        return self.formulas.ranks

    def truth(self, candidate: Candidate) -> Truth:
        raw = self.formulas.truth(candidate)
        prediction = self.predictions[candidate.id]
        rate = prediction.tokens_per_second
        if rate is None or prediction.failure is not None:
            return raw
        dice = random.Random(f"{self.seed} {candidate.id}")
        width = dice.uniform(LEAST, MOST)
        pace = math.exp(dice.gauss(0, SPEED_ERROR * width))
        size = math.exp(dice.gauss(0, MEMORY_ERROR * width))

        # 1. Memory: the phase with the highest peak fails if it is above the limit.
        peaks: dict[Phase, float] = {}
        for phase in prediction.phases:
            peaks[phase.name] = phase.peak_bytes.value * size
        highest = max(peaks, key=lambda name: peaks[name])
        peak = peaks[highest]
        fails = peak > self.limit_bytes

        # 2. Time.
        tokens = raw.tokens
        cycle_seconds = tokens / (rate.value * pace)
        predicted = {name: seconds.value for name, seconds in prediction.seconds_by_phase.items()}
        total = sum(predicted.values())
        by_phase: dict[str, float] = {}
        for phase_name, part in predicted.items():
            by_phase[phase_name] = cycle_seconds * part / total
        for name in ("rollout", "sync", "forward", "backward", "optimizer"):
            by_phase.setdefault(name, 0.0)
        return Truth(
            peak_bytes=peak,
            need_bytes=peak,
            peaks=peaks,
            phase=highest,
            cause="activations" if fails else None,
            numbers={"asked_bytes": peak - self.limit_bytes} if fails else {},
            cycle_seconds=cycle_seconds,
            by_phase=by_phase,
            tokens=tokens,
            load_seconds=raw.load_seconds,
            setup_seconds=raw.setup_seconds,
        )

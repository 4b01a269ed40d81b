"""Speed of this machine, by a run that was measured on it.

With t the predicted seconds of any phase, and f the measured seconds of a step divided by the
predicted ones of the same step,

    value = f t,    low = value sqrt(low / t),    high = value sqrt(high / t)

One factor for all phases: the machine's own. It takes away the error that all configurations of
this model and method share, so the interval keeps half of its width, in logarithms.

    t is 10 s, 5 to 20. A step took 12 s where 10 were predicted: 12 s, 8.5 to 17.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autotune.core.prediction import Estimate, Prediction
from autotune.core.units import counted
from autotune.estimate.throughput.uncompared_cards import with_seconds


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed:
    """Time of measured steps, relative to the predicted one."""

    time_factor: float
    steps: int
    when: str
    host: str

    def __str__(self) -> str:
        return (
            f"steps take {self.time_factor:.2f} times the computed seconds, as in a guarded run on"
            f" {self.host} ({counted(self.steps, 'step')}, {self.when})"
        )


def calibrated(prediction: Prediction, speed: MeasuredSpeed | None) -> Prediction:
    """Return the prediction with the measured speed of the machine, and its basis."""
    if speed is None or prediction.tokens_per_second is None:
        return prediction

    def change(seconds: Estimate) -> Estimate:
        return _calibrated(seconds, speed.time_factor)

    return replace(
        with_seconds(prediction, change),
        assumptions=(*prediction.assumptions, str(speed)),
    )


def _calibrated(seconds: Estimate, factor: float) -> Estimate:
    if seconds.value <= 0:
        return seconds
    value = factor * seconds.value
    return Estimate(
        value=value,
        low=value * math.sqrt(seconds.low / seconds.value),
        high=value * math.sqrt(seconds.high / seconds.value),
    )

"""Speed of an emulated measurement: the predicted one, since nothing was computed."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.measurement import Measurement, Speed
from autotune.core.prediction import Prediction


def with_predicted_speed(measurement: Measurement, prediction: Prediction | None) -> Measurement:
    """Return the measurement with one cycle at the predicted speed; without one where none is
    predicted."""
    timed = measurement.worst
    rate = None if prediction is None else prediction.tokens_per_second
    if timed is None or prediction is None or rate is None or rate.value <= 0:
        return replace(measurement, worst=None, typical=None)
    tokens = timed.cycle_loss_tokens[-1]
    seconds = tokens / rate.value
    speed = Speed(
        completion_tokens=timed.completion_tokens,
        cycle_seconds=(seconds,),
        cycle_loss_tokens=(tokens,),
        prompt_tokens=timed.prompt_tokens,
        phase_seconds=_by_phase(prediction, seconds),
    )
    return replace(measurement, worst=speed, typical=None)


def _by_phase(prediction: Prediction, seconds: float) -> dict[str, float]:
    """Return the predicted shares of the phases, of a cycle of this length."""
    shares = {phase.name: phase.seconds.value for phase in prediction.phases if phase.seconds is not None}
    total = sum(shares.values())
    return {str(name): share * seconds / total for name, share in shares.items()} if total else {"other": seconds}

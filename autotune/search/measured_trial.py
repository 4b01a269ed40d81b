"""Trial of one measurement: its verdict, and what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.core.answer import Expected, Purpose, Trial
from autotune.core.measurement import Measurement, Phase, Speed, judge
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import Candidate


def measured_trial(
    number: int,
    purpose: Purpose,
    candidate: Candidate,
    measurement: Measurement,
    prediction: Prediction | None,
) -> Trial:
    if measurement.emulated:
        measurement = with_predicted_speed(measurement, prediction)
    return Trial(
        number=number,
        purpose=purpose,
        candidate=candidate,
        measurement=measurement,
        verdict=judge(measurement),
        expected=_expected(prediction),
    )


def _expected(prediction: Prediction | None) -> Expected | None:
    if prediction is None:
        return None
    return Expected(
        peak_memory_bytes=prediction.peak_memory_bytes,
        tokens_per_second=prediction.tokens_per_second,
    )


def with_predicted_speed(measurement: Measurement, prediction: Prediction | None) -> Measurement:
    """Return the measurement with cycles at the predicted speed, for the longest and the usual
    lengths, where it is predicted.
    """
    timed = measurement.worst
    if timed is None or prediction is None:
        return replace(measurement, worst=None, typical=None)
    phases = prediction.seconds_by_phase
    phases_at_lengths = prediction.seconds_at_lengths or {}
    rate = prediction.tokens_per_second
    rate_at_lengths = prediction.tokens_per_second_at_lengths
    return replace(
        measurement,
        worst=_predicted_cycle(timed, rate, phases),
        typical=_predicted_cycle(timed, rate_at_lengths, phases_at_lengths),
    )


def _predicted_cycle(
    timed: Speed,
    rate: Estimate | None,
    phases: Mapping[Phase, Estimate],
) -> Speed | None:
    """Return one cycle with the timed tokens at this rate, divided like the predicted phases."""
    if rate is None or rate.value <= 0:
        return None
    tokens = timed.cycle_loss_tokens[-1]
    seconds = tokens / rate.value
    predicted_seconds = sum(phase.value for phase in phases.values())
    phase_seconds: dict[str, float] = {}
    if predicted_seconds:
        for name, phase in phases.items():
            phase_seconds[name] = seconds * phase.value / predicted_seconds
    else:
        phase_seconds["other"] = seconds
    return Speed(
        completion_tokens=timed.completion_tokens,
        cycle_seconds=(seconds,),
        cycle_loss_tokens=(tokens,),
        prompt_tokens=timed.prompt_tokens,
        phase_seconds=phase_seconds,
    )

"""Speed of cards with which no prediction was ever compared.

Seconds follow from a card's peak and the share of it that kernels reach. That share is known of the
cards with public rows (`speed_rows` in the catalogue). On another card

    seconds = predicted seconds * factor,    low <= factor <= high

so that the interval holds what the neighbours of the card have shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autotune.catalog import Gpu, efficiency
from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate, PipelineTimes, Prediction


def is_compared(gpu: Gpu) -> bool:
    return gpu.speed_rows is not None


def widened(prediction: Prediction, gpu: Gpu) -> Prediction:
    """Return the prediction with the speed that is known of this card."""
    if is_compared(gpu):
        return prediction
    seconds = {}
    for phase in prediction.phases:
        if phase.seconds is not None:
            seconds[phase.name] = phase.seconds
    slower = _slower(seconds)
    slower_at_lengths = _slower(prediction.seconds_at_lengths)
    phases = []
    for phase in prediction.phases:
        phases.append(dataclasses.replace(phase, seconds=slower.get(phase.name)))
    return dataclasses.replace(
        prediction,
        phases=tuple(phases),
        tokens_per_second=_rate(prediction.tokens_per_second, seconds, slower),
        tokens_per_second_at_lengths=_rate(
            prediction.tokens_per_second_at_lengths,
            prediction.seconds_at_lengths,
            slower_at_lengths,
        ),
        seconds_at_lengths=slower_at_lengths,
        pipeline=_pipeline(prediction.pipeline),
    )


def _slower(seconds: Mapping[Phase, Estimate]) -> dict[Phase, Estimate]:
    factor = efficiency("uncompared_card_factor")
    return {phase: _product(estimate, factor) for phase, estimate in seconds.items()}


def _product(seconds: Estimate, factor: Estimate) -> Estimate:
    return Estimate(
        value=seconds.value * factor.value,
        low=seconds.low * factor.low,
        high=seconds.high * factor.high,
    )


def _rate(
    rate: Estimate | None,
    before: Mapping[Phase, Estimate],
    after: Mapping[Phase, Estimate],
) -> Estimate | None:
    """Return tokens per second of a cycle whose phases take longer: tokens / seconds."""
    if rate is None or not before:
        return rate
    nothing = Estimate.exactly(0)
    cycle_before = sum(before.values(), start=nothing)
    cycle_after = sum(after.values(), start=nothing)
    return Estimate(
        value=rate.value * cycle_before.value / cycle_after.value,
        low=rate.low * cycle_before.high / cycle_after.high,
        high=rate.high * cycle_before.low / cycle_after.low,
    )


def _pipeline(pipeline: PipelineTimes | None) -> PipelineTimes | None:
    if pipeline is None:
        return None
    factor = efficiency("uncompared_card_factor")
    return PipelineTimes(
        generation=_product(pipeline.generation, factor),
        training=_product(pipeline.training, factor),
    )

"""Speed of cards with which no prediction was ever compared.

Seconds follow from a card's peak and the share of it that kernels reach. That share is known of the
cards with public rows (`speed_rows` in the catalogue). On another card

    seconds = predicted seconds * factor,    low <= factor <= high

so that the interval holds what the neighbours of the card have shown. The products of a mixture's
experts, grouped in one kernel, are known of each architecture by itself: on data-centre Blackwell
they took several times as long as their peak says (torch 2.9).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.catalog import Gpu, efficiency
from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate, PipelineTimes, Prediction
from autotune.estimate.model_shape import Shape

DATACENTER_BLACKWELL = "10."  # Compute capability
ENGINE_PHASES = ("rollout", "sync")  # Bound by memory and links, where peaks are reached


def is_compared(gpu: Gpu) -> bool:
    return gpu.speed_rows is not None


def widened(
    prediction: Prediction,
    gpu: Gpu,
    shape: Shape,
) -> Prediction:
    """Return the prediction with the speed that is known of this card and kind of model."""
    factors = _factors(gpu, shape)
    if factors is None:
        return prediction
    seconds = {}
    for phase in prediction.phases:
        if phase.seconds is not None:
            seconds[phase.name] = phase.seconds
    slower = _slower(seconds, factors)
    slower_at_lengths = _slower(prediction.seconds_at_lengths, factors)
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
        pipeline=_pipeline(prediction.pipeline, factors),
    )


@dataclass(frozen=True, kw_only=True)
class _Factors:
    """What seconds of training and of an engine are multiplied by."""

    training: Estimate
    engine: Estimate


def _factors(gpu: Gpu, shape: Shape) -> _Factors | None:
    """Return the factors; None: the card was compared with models of this kind."""
    capability = gpu.compute_capability or ""
    has_experts = any(layer.experts for layer in shape.layers)
    engine: Estimate = Estimate.exactly(1)
    if not is_compared(gpu):
        engine = efficiency("uncompared_card_factor")
    if has_experts and capability.startswith(DATACENTER_BLACKWELL):
        return _Factors(training=efficiency("datacenter_blackwell_factor"), engine=engine)
    if is_compared(gpu):
        return None
    return _Factors(training=engine, engine=engine)


def _slower(seconds: Mapping[Phase, Estimate], factors: _Factors) -> dict[Phase, Estimate]:
    slower = {}
    for phase, estimate in seconds.items():
        factor = factors.engine if phase in ENGINE_PHASES else factors.training
        slower[phase] = _product(estimate, factor)
    return slower


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


def _pipeline(pipeline: PipelineTimes | None, factors: _Factors) -> PipelineTimes | None:
    if pipeline is None:
        return None
    return PipelineTimes(
        generation=_product(pipeline.generation, factors.engine),
        training=_product(pipeline.training, factors.training),
    )

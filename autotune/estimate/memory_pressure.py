"""Memory pressure: near the limit torch empties its cache and retries, so less memory suffices."""

from __future__ import annotations

import dataclasses

from autotune.core.prediction import Estimate
from autotune.estimate import device_memory
from autotune.estimate.phase_usage import StepStage
from autotune.estimate.timeline import Scene, TimelinePoint, timeline_points

TRAINING_PHASES = ("score", "forward", "backward", "optimizer")


def squeezed(stage: StepStage, scene: Scene, room: Estimate) -> tuple[TimelinePoint, ...] | None:
    """Return the phases within the room, cache emptied where needed; None if they do not fit."""
    capacity = round(room.value - scene.outside.total.value - _engine(scene).value - _other_models(scene))
    if capacity <= 0 or stage.cannot_fit(capacity):
        return None
    tight = stage.usage(capacity)
    if tight.out_of_memory is not None:
        return None
    loose = {use.phase: use.reserved_high_bytes for use in scene.usage.phases}
    phases = tuple(
        dataclasses.replace(use, reserved_high_bytes=max(use.reserved_bytes, loose.get(use.phase, 0))) for use in tight.phases
    )
    return timeline_points(dataclasses.replace(scene, usage=dataclasses.replace(tight, phases=phases)))


def certainly_fits(stage: StepStage, scene: Scene, phases: tuple[TimelinePoint, ...], room: Estimate) -> bool:
    """Return True if every step runs with all else at its highest and the room at its lowest."""
    error = max(device_memory.error_bytes(use, scene.basis).high for use in scene.usage.phases) + scene.high_extra_bytes
    capacity = int(room.low - scene.outside.total.high - _engine(scene).high - _other_models(scene) - error)
    return capacity > 0 and _engine_fits(scene, phases, room) and stage.fits(capacity)


def _engine_fits(scene: Scene, phases: tuple[TimelinePoint, ...], room: Estimate) -> bool:
    """Check that an offloaded engine can wake. One that is never offloaded counts in all phases."""
    if scene.engine is None:
        return True
    if scene.engine.sleeps:
        return all(point.device_bytes.high <= room.low for point in phases if point.phase not in TRAINING_PHASES)
    needed = scene.usage.resting.allocated_bytes + scene.engine.passing_bytes
    return needed + scene.outside.total.high + scene.engine.awake.high <= room.low


def _engine(scene: Scene) -> Estimate:
    return Estimate.exactly(0) if scene.engine is None else scene.engine.held("backward")


def _other_models(scene: Scene) -> int:
    return max((sum(parts.values()) for parts in scene.others.values()), default=0)

"""Under pressure: near the limit torch gives its cache back and tries again, so less suffices than it would like to reserve."""

from __future__ import annotations

import dataclasses

from autotune.predict import shown
from autotune.predict.timeline import Moment, Scene, moments
from autotune.predict.usage import Stage
from autotune.prediction import Estimate

WHILE_TRAINING = ("score", "forward", "backward", "optimizer")


def squeezed(stage: Stage, scene: Scene, room: Estimate) -> tuple[Moment, ...] | None:
    """The phases as they are when torch has to make do with the room; None where it cannot."""
    capacity = round(room.value - scene.outside.total.value - _engine(scene).value - _beside(scene))
    if capacity <= 0 or stage.cannot_go_through(capacity):
        return None
    tight = stage.usage(capacity)
    if tight.out_of_memory is not None:
        return None
    loose = {use.phase: use.reserved_high_bytes for use in scene.usage.phases}
    phases = tuple(
        dataclasses.replace(use, reserved_high_bytes=max(use.reserved_bytes, loose.get(use.phase, 0))) for use in tight.phases
    )
    return moments(dataclasses.replace(scene, usage=dataclasses.replace(tight, phases=phases)))


def certainly_goes_through(stage: Stage, scene: Scene, phases: tuple[Moment, ...], room: Estimate) -> bool:
    """Whether every step runs with all else at its upper end and the room at its lower one."""
    error = max(shown.error_bytes(use, scene.basis).high for use in scene.usage.phases) + scene.high_extra_bytes
    capacity = int(room.low - scene.outside.total.high - _engine(scene).high - _beside(scene) - error)
    if capacity <= 0 or not _engine_finds_room(scene, phases, room):
        return False
    return stage.goes_through(capacity)


def _engine_finds_room(scene: Scene, phases: tuple[Moment, ...], room: Estimate) -> bool:
    """A sleeping engine wakes beside what the trainer cannot give back; one that never sleeps is counted in all phases."""
    if scene.engine is None:
        return True
    if scene.engine.sleeps:
        return all(moment.shown.high <= room.low for moment in phases if moment.phase not in WHILE_TRAINING)
    needs = scene.usage.resting.allocated_bytes + scene.engine.passing_bytes
    return needs + scene.outside.total.high + scene.engine.awake.high <= room.low


def _engine(scene: Scene) -> Estimate:
    return Estimate.exactly(0) if scene.engine is None else scene.engine.held("backward")


def _beside(scene: Scene) -> int:
    return max((sum(parts.values()) for parts in scene.beside.values()), default=0)

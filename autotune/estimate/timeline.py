"""Timeline: models on the device in each phase, and device memory by part.

The trainer's part comes from the replay of its trace. The engine shares the trainer's process, its
CUDA context and torch's cache. Its weights, KV cache and graphs are added while it is awake;
temporary activations of its forward passes come out of the cache that the trainer's step leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autotune.core.measurement import PHASES, Phase
from autotune.core.prediction import Basis, Estimate, PhasePrediction
from autotune.core.trace import Part
from autotune.estimate import device_memory
from autotune.estimate.device_memory import Outside
from autotune.estimate.phase_usage import StepStage, TraceUsage
from autotune.estimate.replay import PhaseUse

POLICY_PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "workspaces", "inputs")
OTHER_MODEL_PARTS = tuple(
    f"{role}_{part}"
    for role in ("reference", "critic", "reward")
    for part in ("weights", "gradients", "optimizer", "activations", "inputs")
)
PARTS = (*POLICY_PARTS, *OTHER_MODEL_PARTS, "kv_cache", "engine", "fragmentation", "context", "communication")
"""Parts of a breakdown, in this order."""


@dataclass(frozen=True, kw_only=True)
class EngineShare:
    """Rollout engine on one of the training devices."""

    awake: Estimate  # while it generates, without its forward passes' temporary activations
    loading: Estimate  # while weights are pushed to it: less than `awake` if it wakes in two steps
    asleep: Estimate
    kv_cache_bytes: int
    weights_bytes: int
    passing_bytes: int  # temporary activations, out of the cache that it shares with the trainer
    sleeps: bool
    wakes_at_once: bool = False  # its cache is back when weights are pushed to it
    starts_after_load: bool = False  # it finds the loaded trainer without a cache, as before a rollout

    def held(self, phase: Phase) -> Estimate:
        if phase == "load" and self.starts_after_load:
            return Estimate.exactly(0)
        if self.has_cache(phase):
            return self.awake
        return self.loading if phase == "sync" else self.asleep

    def has_cache(self, phase: Phase) -> bool:
        if phase == "load":
            return not self.starts_after_load
        return not self.sleeps or phase == "rollout" or (phase == "sync" and self.wakes_at_once)

    def passes(self, phase: Phase) -> int:
        return self.passing_bytes if phase == "rollout" or (phase == "load" and not self.starts_after_load) else 0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Everything on one device."""

    usage: TraceUsage
    basis: Basis
    high_extra_bytes: int
    outside: Outside
    engine: EngineShare | None = None
    others: Mapping[Phase, Mapping[str, int]] = field(default_factory=dict)  # models outside the step, by phase and part
    away: tuple[str, ...] = ()  # parts of the trainer's state that are offloaded during the rollout
    fused_parts: tuple[str, ...] = ()  # parts that may be nearly empty
    communication_at_engine_start: Estimate  # NCCL's buffers that exist by then
    parts_at_engine_start: tuple[str, ...] | None = None  # the trainer's parts that exist by then; None: all

    @property
    def away_bytes(self) -> int:
        return sum(size for part, size in self.usage.resting.parts.items() if part in self.away)


@dataclass(frozen=True, kw_only=True)
class TimelinePoint:
    """Peak of one phase."""

    phase: Phase
    torch_reserved: Estimate  # the trainer's part of torch's cache, the engine's activations included
    device_bytes: Estimate
    parts: Mapping[str, int]

    @property
    def prediction(self) -> PhasePrediction:
        return PhasePrediction(name=self.phase, peak_bytes=self.device_bytes, seconds=None, parts=self.parts)


def timeline_points(scene: Scene) -> tuple[TimelinePoint, ...]:
    """Return every phase that runs, in the order of `PHASES`."""
    uses = {use.phase: use for use in scene.usage.phases}
    if scene.engine is not None:
        for phase in ("rollout", "sync"):
            uses.setdefault(phase, _resting(scene, phase))
    return tuple((_load_point if phase == "load" else _point)(scene, uses[phase]) for phase in PHASES if phase in uses)


def phase_predictions(scene: Scene, points: tuple[TimelinePoint, ...]) -> tuple[PhasePrediction, ...]:
    """Return the phases as a meter sees them: a sync begins beside the cache of the step before it.

    The trainer empties that cache before an engine that sleeps wakes. It is no higher than the step,
    so that no peak depends on it. Beside an engine that never sleeps the cache stays: from the third
    cycle on, all phases find it.
    """
    at = {point.phase: point for point in points}
    if scene.engine is not None and not scene.engine.sleeps:
        top = max((point for point in points if point.phase != "load"), key=lambda point: point.device_bytes.value, default=None)
        return tuple((point if point.phase == "load" or top is None else _filled(point, top)).prediction for point in points)
    step = at.get("optimizer")
    if scene.engine is None or not scene.engine.sleeps or "sync" not in at or step is None:
        return tuple(point.prediction for point in points)
    arrival = _point(scene, dataclasses.replace(_resting(scene, "sync"), phase="optimizer"))
    parts = {**arrival.parts, "fragmentation": 0}
    parts["fragmentation"] = round(step.device_bytes.value) - sum(parts.values())
    begun = dataclasses.replace(step, phase="sync", parts={name: parts[name] for name in PARTS if parts.get(name)})
    higher = max(begun, at["sync"], key=lambda point: point.device_bytes.value)
    return tuple((higher if point.phase == "sync" else point).prediction for point in points)


def _filled(point: TimelinePoint, top: TimelinePoint) -> TimelinePoint:
    """Return the phase in the cache that the highest one left."""
    more = round(top.device_bytes.value) - sum(point.parts.values())
    parts = {**point.parts, "fragmentation": point.parts.get("fragmentation", 0) + more}
    return dataclasses.replace(
        point, device_bytes=top.device_bytes, parts={name: parts[name] for name in PARTS if parts.get(name)}
    )


def peak(several: tuple[TimelinePoint, ...]) -> TimelinePoint:
    """Return the highest point; of equals the least fragmented one, which filled the cache."""
    return max(several, key=lambda point: (point.device_bytes.value, -point.parts.get("fragmentation", 0)))


def _resting(scene: Scene, phase: Phase) -> PhaseUse:
    """Return the trainer between two steps: state, and cache unless an engine emptied it."""
    uses, resting = scene.usage.phases, scene.usage.resting
    cached = 0 if scene.engine is not None and scene.engine.sleeps else max(use.reserved_bytes for use in uses)
    cached_high = 0 if not cached else max(use.reserved_high_bytes for use in uses)
    away = scene.away_bytes if phase == "rollout" else 0
    return PhaseUse(
        phase=phase,
        requested_bytes=max(0, resting.requested_bytes - away),
        allocated_bytes=max(0, resting.allocated_bytes - away),
        reserved_bytes=max(resting.reserved_bytes - away, cached, 0),
        reserved_high_bytes=max(resting.reserved_high_bytes - away, cached_high, 0),
        parts={part: size for part, size in resting.parts.items() if not away or part not in scene.away},
    )


def _load_point(scene: Scene, use: PhaseUse) -> TimelinePoint:
    """max(engine's start beside what is there by then, the trainer's whole state beside the started engine)."""
    if scene.engine is None or scene.engine.starts_after_load:
        return _point(scene, use)
    found, outside = use, dataclasses.replace(scene.outside, communication=scene.communication_at_engine_start)
    if scene.parts_at_engine_start is not None:
        parts: dict[Part, int] = {part: size for part, size in use.parts.items() if part in scene.parts_at_engine_start}
        size = sum(parts.values())
        found = dataclasses.replace(
            use, requested_bytes=size, allocated_bytes=size, reserved_bytes=size, reserved_high_bytes=size, parts=parts
        )
    start = _point(dataclasses.replace(scene, outside=outside), found)
    whole = _point(scene, use, engine_phase="backward")
    return max(start, whole, key=lambda point: point.device_bytes.value)


def _point(scene: Scene, use: PhaseUse, engine_phase: Phase | None = None) -> TimelinePoint:
    """Sum of trainer, engine's activations beyond the free cache, other models, CUDA, engine."""
    free = use.reserved_bytes - use.allocated_bytes
    at = engine_phase or use.phase
    passing = 0 if scene.engine is None else max(0, scene.engine.passes(at) - free)
    held = device_memory.reserved(use, scene.basis, scene.high_extra_bytes)
    others = device_memory.other_models(scene.others.get(use.phase, {}), scene.basis)
    reserved = held + Estimate.exactly(passing) + others
    total = reserved + scene.outside.total
    if scene.engine is not None:
        total = total + scene.engine.held(at)
    fused_parts = sum(size for part, size in use.parts.items() if part in scene.fused_parts)
    total = Estimate(value=total.value, low=max(0.0, total.low - fused_parts), high=total.high)
    return TimelinePoint(
        phase=use.phase,
        torch_reserved=reserved,
        device_bytes=device_memory.whole_bytes(total),
        parts=_parts(scene, use, at, passing, round(total.value)),
    )


def _parts(scene: Scene, use: PhaseUse, engine_phase: Phase, passing: int, total: int) -> dict[str, int]:
    """Return bytes by part; fragmentation is the remainder, so that they sum to the total."""
    parts: dict[str, int] = {str(name): size for name, size in use.parts.items()}
    for name, size in scene.others.get(use.phase, {}).items():
        parts[name] = parts.get(name, 0) + size
    parts["context"] = round(scene.outside.context.value)
    parts["communication"] = parts.get("communication", 0) + round(scene.outside.communication.value)
    for name, size in _engine_parts(scene.engine, engine_phase, passing):
        parts[name] = parts.get(name, 0) + size
    parts["fragmentation"] = total - sum(parts.values())
    return {name: parts[name] for name in PARTS if parts.get(name)}


def _engine_parts(engine: EngineShare | None, phase: Phase, passing: int) -> Iterator[tuple[str, int]]:
    if engine is None:
        return
    cache = engine.kv_cache_bytes if engine.has_cache(phase) else 0
    yield "kv_cache", cache
    yield "engine", round(engine.held(phase).value) - cache + passing


# Memory pressure: near the limit torch empties its cache and retries, so less memory suffices.

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

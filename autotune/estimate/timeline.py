"""Timeline: device memory (NVML) of every phase, by part, each figure an interval with a known
cause.

- allocated = a ± e: trace against torch's own peak; e is larger for a generic step
- reserved: low: `allocated`; value: the replay; high: the replay after a shorter first step
- device memory = reserved + CUDA context with kernels + NCCL buffers, each with its own interval

The trainer's part comes from the replay of its trace. The engine shares the trainer's process, its
CUDA context and torch's cache. Its weights, KV cache and graphs are added while it is awake;
temporary activations of its forward passes come out of the cache that the trainer's step leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autotune.catalog import percent
from autotune.core.composition import Composition
from autotune.core.measurement import PHASES, Phase
from autotune.core.prediction import Estimate, PhasePrediction, TraceBasis
from autotune.core.trace import Trace
from autotune.estimate.replay import PhaseUse, StepStage, TraceUsage
from autotune.estimate.rollout_engine import EngineUse
from autotune.estimate.trace_context import parts_at_engine_start

POLICY_PARTS = (
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "workspaces",
    "inputs",
)
OTHER_MODEL_PARTS = tuple(
    f"{role}_{part}"
    for role in ("reference", "critic", "reward")
    for part in ("weights", "gradients", "optimizer", "activations", "inputs")
)
PARTS = (
    *POLICY_PARTS,
    *OTHER_MODEL_PARTS,
    "kv_cache",
    "engine",
    "fragmentation",
    "context",
    "communication",
)
"""Parts of a breakdown, in this order."""

STATE = frozenset({"weights", "adapters", "gradients", "optimizer", "kv_cache"})
"""Parts that the model's shape determines, also for a generic step."""

TRAINING_PHASES = ("score", "forward", "backward", "optimizer")


# Intervals.


def error_bytes(use: PhaseUse, basis: TraceBasis) -> Estimate:
    """Error of the trace itself in this phase, around 0."""
    share = percent("trace_error_percent").scaled(use.requested_bytes)
    if basis == "traced":
        return share
    sent = (
        {"communication"} if use.phase == "sync" else set()
    )  # whole weights and a buffer: counted, not a step's
    moving = sum(size for part, size in use.parts.items() if part not in STATE and part not in sent)
    return share + percent("generic_error_percent").scaled(moving)


def other_models(parts: Mapping[str, int], basis: TraceBasis) -> Estimate:
    """Bytes of models outside the step, with activations scaled from the policy's."""
    size, scaled = (
        sum(parts.values()),
        sum(size for part, size in parts.items() if part.endswith("_activations")),
    )
    if basis == "traced":
        return Estimate.exactly(size)
    return Estimate.exactly(size) + percent("generic_error_percent").scaled(scaled)


def around(size: int, error: Estimate, high_extra_bytes: int) -> Estimate:
    """Return size + error, at least 0."""
    return Estimate(
        value=size, low=max(0, size + error.low), high=size + error.high + high_extra_bytes
    )


def whole_bytes(estimate: Estimate) -> Estimate:
    value = round(estimate.value)
    return Estimate(
        value=value, low=min(value, round(estimate.low)), high=max(value, round(estimate.high))
    )


def verdict(peak: Estimate, room: Estimate) -> bool | None:
    """Return True or False if the two intervals do not overlap, else None."""
    if peak.high <= room.low:
        return True
    return False if peak.low > room.high else None


# What is on the device.


@dataclass(frozen=True, kw_only=True)
class EngineShare:
    """Rollout engine on one of the training devices."""

    awake: Estimate  # while it generates, without its forward passes' temporary activations
    loading: Estimate  # while weights are pushed to it: less than `awake` if it wakes in two steps
    asleep: Estimate
    kv_cache_bytes: int
    passing_bytes: int  # temporary activations, out of the cache that it shares with the trainer
    sleeps: bool
    wakes_at_once: bool = False  # its cache is back when weights are pushed to it
    starts_after_load: bool = (
        False  # it finds the loaded trainer without a cache, as before a rollout
    )

    @classmethod
    def of(cls, use: EngineUse, composition: Composition) -> EngineShare:
        """Split off its temporary activations, which come out of the shared cache."""
        settings = composition.engine
        assert settings is not None
        passing = 0 if settings.apart else use.parts.get("activations", 0)
        cache = use.parts.get("kv_cache", 0)
        awake, asleep = use.reserved_bytes, use.asleep_bytes
        if settings.shares_weights:
            value, low, high = (
                max(0.0, end - use.weights_bytes) for end in (awake.value, awake.low, awake.high)
            )
            awake, asleep = Estimate(value=value, low=low, high=high), Estimate.exactly(0)
        value = max(0.0, awake.value - passing)
        standing = loading = Estimate(
            value=value, low=min(value, awake.low), high=max(value, awake.high - passing)
        )
        if value >= cache:
            loading = Estimate(
                value=value - cache, low=max(0.0, standing.low - cache), high=standing.high - cache
            )
        return cls(
            awake=standing,
            loading=loading,
            asleep=asleep,
            kv_cache_bytes=cache,
            passing_bytes=passing,
            sleeps=settings.sleep,
            wakes_at_once=settings.wakes_at_once,
            starts_after_load=composition.empties_before_engine,
        )

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
        return (
            self.passing_bytes
            if phase == "rollout" or (phase == "load" and not self.starts_after_load)
            else 0
        )


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Everything on one device."""

    usage: TraceUsage
    trace: Trace
    composition: Composition
    context: Estimate  # of CUDA, with kernels, of all processes
    communication: Estimate  # NCCL's buffers
    communication_at_engine_start: Estimate  # those that exist by then
    engine: EngineShare | None = None
    others: Mapping[Phase, Mapping[str, int]] = field(
        default_factory=dict
    )  # models outside the step, by phase and part

    @property
    def away_bytes(self) -> int:
        return sum(
            size
            for part, size in self.usage.resting.parts.items()
            if part in self.composition.offloaded_in_rollout
        )

    @property
    def outside(self) -> Estimate:
        """Memory of the process outside torch's allocator."""
        return self.context + self.communication


@dataclass(frozen=True, kw_only=True)
class TimelinePoint:
    """Peak of one phase."""

    phase: Phase
    torch_reserved: (
        Estimate  # the trainer's part of torch's cache, the engine's activations included
    )
    device_bytes: Estimate
    parts: Mapping[str, int]


def timeline_points(scene: Scene) -> tuple[TimelinePoint, ...]:
    """Return every phase that runs, in the order of `PHASES`."""
    uses = {use.phase: use for use in scene.usage.phases}
    if scene.engine is not None:
        for phase in ("rollout", "sync"):
            uses.setdefault(phase, _resting(scene, phase))
    return tuple(
        (_load_point if phase == "load" else _point)(scene, uses[phase])
        for phase in PHASES
        if phase in uses
    )


def peak(several: tuple[TimelinePoint, ...]) -> TimelinePoint:
    """Return the highest point; of equals the least fragmented one, which filled the cache."""
    return max(
        several, key=lambda point: (point.device_bytes.value, -point.parts.get("fragmentation", 0))
    )


def phase_predictions(
    scene: Scene, points: tuple[TimelinePoint, ...]
) -> tuple[PhasePrediction, ...]:
    """Return the phases as a meter sees them: a sync begins beside the cache of the step before it.

    The trainer empties that cache before an engine that sleeps wakes. It is no higher than the
    step, so that no peak depends on it. Beside an engine that never sleeps the cache stays: from
    the third cycle on, all phases find it.
    """
    at = {point.phase: point for point in points}
    engine, step = scene.engine, at.get("optimizer")
    if engine is not None and not engine.sleeps:
        top = max(
            (point for point in points if point.phase != "load"),
            key=lambda point: point.device_bytes.value,
            default=None,
        )
        points = tuple(
            (
                point
                if point.phase == "load" or top is None
                else replace(
                    point,
                    device_bytes=top.device_bytes,
                    parts=_filled_up(point.parts, top.device_bytes.value),
                )
            )
            for point in points
        )
    elif engine is not None and "sync" in at and step is not None:
        arrival = _point(scene, replace(_resting(scene, "sync"), phase="optimizer"))
        begun = replace(
            step, phase="sync", parts=_filled_up(arrival.parts, step.device_bytes.value)
        )
        higher = max(begun, at["sync"], key=lambda point: point.device_bytes.value)
        points = tuple(higher if point.phase == "sync" else point for point in points)
    return tuple(
        PhasePrediction(
            name=point.phase, peak_bytes=point.device_bytes, seconds=None, parts=point.parts
        )
        for point in points
    )


def _filled_up(parts: Mapping[str, int], total: float) -> dict[str, int]:
    """Return the parts in their order; fragmentation is the remainder, so that they sum to the
    total.
    """
    known = {name: size for name, size in parts.items() if name != "fragmentation"}
    known["fragmentation"] = round(total) - sum(known.values())
    return {name: known[name] for name in PARTS if known.get(name)}


def _resting(scene: Scene, phase: Phase) -> PhaseUse:
    """Return the trainer between two steps: state, and cache unless an engine emptied it."""
    uses, resting = scene.usage.phases, scene.usage.resting
    cached = (
        0
        if scene.engine is not None and scene.engine.sleeps
        else max(use.reserved_bytes for use in uses)
    )
    cached_high = 0 if not cached else max(use.reserved_high_bytes for use in uses)
    rest = resting.without(scene.composition.offloaded_in_rollout if phase == "rollout" else ())
    high = max(rest.reserved_high_bytes, cached_high)
    return replace(
        rest, phase=phase, reserved_bytes=max(rest.reserved_bytes, cached), reserved_high_bytes=high
    )


def _load_point(scene: Scene, use: PhaseUse) -> TimelinePoint:
    """max(engine's start beside what is there by then, the trainer's whole state beside the
    started engine).
    """
    if scene.engine is None or scene.engine.starts_after_load:
        return _point(scene, use)
    found = use
    made = parts_at_engine_start(scene.composition)
    if made is not None:
        parts = {part: size for part, size in use.parts.items() if part in made}
        size = sum(parts.values())
        found = replace(
            use,
            requested_bytes=size,
            allocated_bytes=size,
            reserved_bytes=size,
            reserved_high_bytes=size,
            parts=parts,
        )
    start = _point(replace(scene, communication=scene.communication_at_engine_start), found)
    whole = _point(scene, use, engine_phase="backward")
    return max(start, whole, key=lambda point: point.device_bytes.value)


def _point(scene: Scene, use: PhaseUse, engine_phase: Phase | None = None) -> TimelinePoint:
    """Sum of trainer, engine's activations beyond the free cache, other models, CUDA, engine."""
    at, engine, others = engine_phase or use.phase, scene.engine, scene.others.get(use.phase, {})
    # 1. torch's cache.
    passing = (
        0
        if engine is None
        else max(0, engine.passes(at) - (use.reserved_bytes - use.allocated_bytes))
    )
    error = error_bytes(use, scene.trace.basis)
    held = Estimate(
        value=use.reserved_bytes,
        low=max(0, min(use.reserved_bytes, use.allocated_bytes + error.low)),
        high=use.reserved_high_bytes + error.high + scene.trace.possible_extra_bytes,
    )
    reserved = held + Estimate.exactly(passing) + other_models(others, scene.trace.basis)
    # 2. The device.
    total = reserved + scene.outside
    if engine is not None:
        total = total + engine.held(at)
    fused_parts = sum(
        size for part, size in use.parts.items() if part in scene.composition.fused_parts
    )
    total = Estimate(value=total.value, low=max(0.0, total.low - fused_parts), high=total.high)
    # 3. By part.
    parts: Counter[str] = Counter({str(name): size for name, size in use.parts.items()})
    parts.update(others)
    parts.update(context=round(scene.context.value), communication=round(scene.communication.value))
    if engine is not None:
        cache = engine.kv_cache_bytes if engine.has_cache(at) else 0
        parts.update(kv_cache=cache, engine=round(engine.held(at).value) - cache + passing)
    return TimelinePoint(
        phase=use.phase,
        torch_reserved=reserved,
        device_bytes=whole_bytes(total),
        parts=_filled_up(parts, total.value),
    )


# Memory pressure: near the limit torch empties its cache and retries, so less memory suffices.


def squeezed(stage: StepStage, scene: Scene, room: Estimate) -> tuple[TimelinePoint, ...] | None:
    """Return the phases within the room, cache emptied where needed; None if they do not fit."""
    capacity = round(room.value - scene.outside.value - _engine(scene).value - _other_models(scene))
    if capacity <= 0 or stage.cannot_fit(capacity):
        return None
    tight = stage.usage(capacity)
    if tight.out_of_memory is not None:
        return None
    loose = {use.phase: use.reserved_high_bytes for use in scene.usage.phases}
    phases = tuple(
        replace(use, reserved_high_bytes=max(use.reserved_bytes, loose.get(use.phase, 0)))
        for use in tight.phases
    )
    return timeline_points(replace(scene, usage=replace(tight, phases=phases)))


def certainly_fits(
    stage: StepStage, scene: Scene, phases: tuple[TimelinePoint, ...], room: Estimate
) -> bool:
    """Return True if every step runs, and an engine wakes, with all else at its highest and the
    room at its lowest.
    """
    error = (
        max(error_bytes(use, scene.trace.basis).high for use in scene.usage.phases)
        + scene.trace.possible_extra_bytes
    )
    capacity = int(
        room.low - scene.outside.high - _engine(scene).high - _other_models(scene) - error
    )
    if capacity <= 0:
        return False
    engine = scene.engine
    if engine is not None and engine.sleeps:
        if any(
            point.device_bytes.high > room.low
            for point in phases
            if point.phase not in TRAINING_PHASES
        ):
            return False
    elif engine is not None:  # it counts in all phases
        needed = scene.usage.resting.allocated_bytes + engine.passing_bytes
        if needed + scene.outside.high + engine.awake.high > room.low:
            return False
    return stage.fits(capacity)


def _engine(scene: Scene) -> Estimate:
    return Estimate.exactly(0) if scene.engine is None else scene.engine.held("backward")


def _other_models(scene: Scene) -> int:
    return max((sum(parts.values()) for parts in scene.others.values()), default=0)

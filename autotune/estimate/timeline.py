"""Timeline: device memory (NVML) of every phase, by part, each figure an interval with a known
cause.

    allocated = a ± e                  e: trace against torch's own peak; larger for a generic step
    reserved  = low:   a ± e
                value: the replay
                high:  the replay after a shorter first step, + e
    device    = reserved + CUDA context with kernels + NCCL buffers + engine

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
from autotune.estimate.engine_use import EngineUse
from autotune.estimate.phase_use import PhaseUse, TraceUsage
from autotune.estimate.replay import StepStage
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
    for role in ("reference", "critic", "reward", "beside")
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


def error_bytes(
    use: PhaseUse,
    basis: TraceBasis,
    composition: Composition,
) -> Estimate:
    """Error of the trace itself in this phase, around 0.

    A generic step adds a small error for each part that the framework computes by the same code,
    and a large one for each that its own code computes.
    """
    of_trace = percent("trace_error_percent").scaled(use.requested_bytes)
    if basis == "traced":
        return of_trace
    same_code = percent("same_code_error_percent")
    own_code = percent("generic_error_percent")
    counted = STATE
    if use.phase == "sync":  # whole weights and a buffer: counted, not a step's
        counted = STATE | {"communication"}

    low = high = 0.0
    for part, size in use.parts.items():
        if part in counted:
            continue
        error = same_code if part in composition.same_code_parts else own_code
        high += error.high * size
        if part == "logits":  # a prompt may have none, whoever computes the others
            error = own_code
        low += error.low * size
    return of_trace + Estimate(value=0, low=low, high=high)


def other_models(parts: Mapping[str, int], basis: TraceBasis) -> Estimate:
    """Bytes of models outside the step, with activations scaled from the policy's."""
    total = Estimate.exactly(sum(parts.values()))
    if basis == "traced":
        return total
    scaled = sum(size for part, size in parts.items() if part.endswith("_activations"))
    return total + percent("generic_error_percent").scaled(scaled)


def around(
    size: int,
    error: Estimate,
    high_extra_bytes: int,
) -> Estimate:
    """Return size + error, at least 0."""
    high = size + error.high + high_extra_bytes
    return Estimate(
        value=size,
        low=max(0, size + error.low),
        high=high,
    )


def whole_bytes(estimate: Estimate) -> Estimate:
    value = round(estimate.value)
    low = round(estimate.low)
    high = round(estimate.high)
    return Estimate(
        value=value,
        low=min(value, low),
        high=max(value, high),
    )


def verdict(peak: Estimate, room: Estimate) -> bool | None:
    """Return True or False if the two intervals do not overlap, else None."""
    if peak.high <= room.low:
        return True
    if peak.low > room.high:
        return False
    return None


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
    # It finds the loaded trainer without a cache, as before a rollout.
    starts_after_load: bool = False

    @classmethod
    def of(cls, use: EngineUse, composition: Composition) -> EngineShare:
        """Split off its temporary activations, which come out of the shared cache."""
        settings = composition.engine
        assert settings is not None
        reserved = use.reserved_bytes
        asleep = use.asleep_bytes
        if settings.shares_weights:
            reserved = _without(reserved, use.weights_bytes)
            asleep = Estimate.exactly(0)

        passing = 0
        if not settings.apart:
            passing = use.parts.get("activations", 0)
        value = max(0.0, reserved.value - passing)
        awake = Estimate(
            value=value,
            low=min(value, reserved.low),
            high=max(value, reserved.high - passing),
        )
        cache = use.parts.get("kv_cache", 0)
        loading = awake
        if value >= cache:
            loading = _without(awake, cache)
        return cls(
            awake=awake,
            loading=loading,
            asleep=asleep,
            kv_cache_bytes=cache,
            passing_bytes=passing,
            sleeps=settings.sleep,
            wakes_at_once=settings.wakes_at_once,
            starts_after_load=composition.empties_before_engine,
        )

    def held(self, phase: Phase) -> Estimate:
        """Return its memory in a phase."""
        if phase == "load" and self.starts_after_load:
            return Estimate.exactly(0)
        if self.has_cache(phase):
            return self.awake
        return self.loading if phase == "sync" else self.asleep

    def has_cache(self, phase: Phase) -> bool:
        if phase == "load":
            return not self.starts_after_load
        if not self.sleeps or phase == "rollout":
            return True
        return phase == "sync" and self.wakes_at_once

    def passes(self, phase: Phase) -> int:
        """Return the temporary activations of a phase in which it makes forward passes."""
        starts = phase == "load" and not self.starts_after_load
        return self.passing_bytes if starts or phase == "rollout" else 0


def _without(estimate: Estimate, size: int) -> Estimate:
    return Estimate(
        value=max(0.0, estimate.value - size),
        low=max(0.0, estimate.low - size),
        high=max(0.0, estimate.high - size),
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
    # Bytes of models outside the step, by phase and part.
    outside_models: Mapping[Phase, Mapping[str, int]] = field(default_factory=dict)

    @property
    def away_bytes(self) -> int:
        """State that is on the host during a rollout."""
        offloaded = self.composition.offloaded_in_rollout
        state = self.usage.resting.parts
        return sum(size for part, size in state.items() if part in offloaded)

    @property
    def outside(self) -> Estimate:
        """Memory of the process outside torch's allocator."""
        return self.context + self.communication

    @property
    def engine_while_training(self) -> Estimate:
        if self.engine is None:
            return Estimate.exactly(0)
        return self.engine.held("backward")

    @property
    def other_models_bytes(self) -> int:
        """Models outside the step, in the phase that has most of them."""
        return max((sum(parts.values()) for parts in self.outside_models.values()), default=0)


# The phases.


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
        uses.setdefault("rollout", _resting(scene, "rollout"))
        uses.setdefault("sync", _resting(scene, "sync"))
    points = []
    for phase in PHASES:
        if phase not in uses:
            continue
        point_of = _load_point if phase == "load" else _point
        points.append(point_of(scene, uses[phase]))
    return tuple(points)


def peak(points: tuple[TimelinePoint, ...]) -> TimelinePoint:
    """Return the highest point; of equals the least fragmented one, which filled the cache."""

    def height(point: TimelinePoint) -> tuple[float, int]:
        return point.device_bytes.value, -point.parts.get("fragmentation", 0)

    return max(points, key=height)


def phase_predictions(
    scene: Scene, points: tuple[TimelinePoint, ...]
) -> tuple[PhasePrediction, ...]:
    """Return the phases as a meter sees them."""
    if scene.engine is not None:
        if scene.engine.sleeps:
            points = _with_cache_at_sync(scene, points)
        else:
            points = _with_lasting_cache(points)
    return tuple(
        PhasePrediction(
            name=point.phase,
            peak_bytes=point.device_bytes,
            seconds=None,
            parts=point.parts,
        )
        for point in points
    )


def _with_lasting_cache(points: tuple[TimelinePoint, ...]) -> tuple[TimelinePoint, ...]:
    """Return the points beside an engine that never sleeps: the step's cache stays, and from the
    third cycle on all phases find it.
    """
    after_load = [point for point in points if point.phase != "load"]
    if not after_load:
        return points
    highest = max(after_load, key=lambda point: point.device_bytes.value)
    lasting = []
    for point in points:
        if point.phase != "load":
            parts = _filled_up(point.parts, highest.device_bytes.value)
            point = replace(point, device_bytes=highest.device_bytes, parts=parts)
        lasting.append(point)
    return tuple(lasting)


def _with_cache_at_sync(
    scene: Scene, points: tuple[TimelinePoint, ...]
) -> tuple[TimelinePoint, ...]:
    """Return the points with a sync that begins beside the cache of the step before it.

    The trainer empties that cache before the engine wakes. It is no higher than the step, so that
    no peak depends on it.
    """
    by_phase = {point.phase: point for point in points}
    if "sync" not in by_phase or "optimizer" not in by_phase:
        return points
    step = by_phase["optimizer"]
    sync = by_phase["sync"]
    arrival = _point(scene, replace(_resting(scene, "sync"), phase="optimizer"))
    parts = _filled_up(arrival.parts, step.device_bytes.value)
    begun = replace(step, phase="sync", parts=parts)
    higher = max(begun, sync, key=lambda point: point.device_bytes.value)
    return tuple(higher if point.phase == "sync" else point for point in points)


def _filled_up(parts: Mapping[str, int], total: float) -> dict[str, int]:
    """Return the parts in their order; fragmentation is the remainder, so that they sum to the
    total.
    """
    sizes = dict(parts)
    sizes["fragmentation"] = 0
    sizes["fragmentation"] = round(total) - sum(sizes.values())
    return {name: sizes[name] for name in PARTS if sizes.get(name)}


def _resting(scene: Scene, phase: Phase) -> PhaseUse:
    """Return the trainer between two steps: state, and cache unless an engine emptied it."""
    uses = scene.usage.phases
    offloaded = scene.composition.offloaded_in_rollout if phase == "rollout" else ()
    state = scene.usage.resting.without(offloaded)
    reserved = state.reserved_bytes
    reserved_high = state.reserved_high_bytes
    if scene.engine is None or not scene.engine.sleeps:
        reserved = max(reserved, *(use.reserved_bytes for use in uses))
        reserved_high = max(reserved_high, *(use.reserved_high_bytes for use in uses))
    return replace(
        state,
        phase=phase,
        reserved_bytes=reserved,
        reserved_high_bytes=reserved_high,
    )


def _load_point(scene: Scene, use: PhaseUse) -> TimelinePoint:
    """max(engine's start beside what is there by then, the trainer's whole state beside the
    started engine).
    """
    if scene.engine is None or scene.engine.starts_after_load:
        return _point(scene, use)
    at_start = replace(scene, communication=scene.communication_at_engine_start)
    start = _point(at_start, _loaded_at_engine_start(scene, use))
    loaded = _point(scene, use, engine_phase="backward")
    return max(start, loaded, key=lambda point: point.device_bytes.value)


def _loaded_at_engine_start(scene: Scene, use: PhaseUse) -> PhaseUse:
    """Return the trainer's parts that exist when the engine starts."""
    present = parts_at_engine_start(scene.composition)
    if present is None:
        return use
    parts = {part: size for part, size in use.parts.items() if part in present}
    size = sum(parts.values())
    return replace(
        use,
        requested_bytes=size,
        allocated_bytes=size,
        reserved_bytes=size,
        reserved_high_bytes=size,
        parts=parts,
    )


def _point(
    scene: Scene,
    use: PhaseUse,
    engine_phase: Phase | None = None,
) -> TimelinePoint:
    """Sum of trainer, engine's activations beyond the free cache, other models, CUDA, engine."""
    phase = engine_phase or use.phase
    engine = scene.engine
    trace = scene.trace
    outside_step = scene.outside_models.get(use.phase, {})
    # 1. torch's cache.
    free_in_cache = use.reserved_bytes - use.allocated_bytes
    passing = 0
    if engine is not None:
        passing = max(0, engine.passes(phase) - free_in_cache)
    error = error_bytes(use, trace.basis, scene.composition)
    trainer = Estimate(
        value=use.reserved_bytes,
        low=max(0, min(use.reserved_bytes, use.allocated_bytes + error.low)),
        high=use.reserved_high_bytes + error.high + trace.possible_extra_bytes,
    )
    reserved = trainer + Estimate.exactly(passing) + other_models(outside_step, trace.basis)

    # 2. The device. Fused kernels may save some parts.
    total = reserved + scene.outside
    if engine is not None:
        total = total + engine.held(phase)
    fused = scene.composition.fused_parts
    saved = sum(size for part, size in use.parts.items() if part in fused)
    total = replace(total, low=max(0.0, total.low - saved))

    # 3. By part.
    parts: Counter[str] = Counter()
    parts.update({str(name): size for name, size in use.parts.items()})
    parts.update(outside_step)
    parts["context"] += round(scene.context.value)
    parts["communication"] += round(scene.communication.value)
    if engine is not None:
        cache = engine.kv_cache_bytes if engine.has_cache(phase) else 0
        parts["kv_cache"] += cache
        parts["engine"] += round(engine.held(phase).value) - cache + passing
    return TimelinePoint(
        phase=use.phase,
        torch_reserved=reserved,
        device_bytes=whole_bytes(total),
        parts=_filled_up(parts, total.value),
    )


# Memory pressure: near the limit torch empties its cache and retries, so less memory suffices.


def squeezed(
    stage: StepStage,
    scene: Scene,
    room: Estimate,
) -> tuple[TimelinePoint, ...] | None:
    """Return the phases within the room, cache emptied where needed; None if they do not fit."""
    room_left = room.value - scene.outside.value - scene.engine_while_training.value
    capacity = round(room_left - scene.other_models_bytes)
    if capacity < stage.requested_bytes:
        return None
    tight = stage.usage(capacity)
    if tight.out_of_memory is not None:
        return None
    high_bytes = {use.phase: use.reserved_high_bytes for use in scene.usage.phases}
    phases = []
    for use in tight.phases:
        high = max(use.reserved_bytes, high_bytes.get(use.phase, 0))
        phases.append(replace(use, reserved_high_bytes=high))
    usage = replace(tight, phases=tuple(phases))
    return timeline_points(replace(scene, usage=usage))


def certain_capacity(
    scene: Scene,
    points: tuple[TimelinePoint, ...],
    room: Estimate,
) -> int | None:
    """Return the memory for the steps with all else at its highest and the room at its lowest;
    None if there is none, or an engine may not wake.
    """
    error = scene.trace.possible_extra_bytes + max(
        error_bytes(use, scene.trace.basis, scene.composition).high for use in scene.usage.phases
    )
    room_left = room.low - scene.outside.high - scene.engine_while_training.high
    capacity = int(room_left - scene.other_models_bytes - error)
    if capacity <= 0 or not _engine_certainly_fits(scene, points, room):
        return None
    return capacity


def _engine_certainly_fits(
    scene: Scene,
    points: tuple[TimelinePoint, ...],
    room: Estimate,
) -> bool:
    engine = scene.engine
    if engine is None:
        return True
    if not engine.sleeps:  # it counts in all phases
        needed = scene.usage.resting.allocated_bytes + engine.passing_bytes
        return needed + scene.outside.high + engine.awake.high <= room.low
    for point in points:
        if point.phase not in TRAINING_PHASES and point.device_bytes.high > room.low:
            return False
    return True

"""Prediction of one candidate: peaks, parts, speed, and whether it fits.

    trace -> context -> replay -> timeline of the phases -> verdict

On a GPU: 1. the trainer and the other models, 2. the engine in the memory that is left, 3. the
phases, under pressure those of an allocator with this capacity, 4. the verdict.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping

from autotune import catalog
from autotune.catalog import communication, estimate, percent
from autotune.core.composition import Composition, EngineSettings
from autotune.core.measurement import PHASES, Phase
from autotune.core.prediction import EngineFit, Estimate, PhasePrediction, Prediction, highest
from autotune.core.trace import Trace
from autotune.core.units import format_bytes
from autotune.estimate import rollout_engine, timeline, weight_sync
from autotune.estimate.engine_use import EngineUse
from autotune.estimate.other_models import other_model_bytes
from autotune.estimate.replay import PhaseUse, StepStage, TraceUsage
from autotune.estimate.throughput import with_speed
from autotune.estimate.timeline import EngineShare, Scene, TimelinePoint, whole_bytes
from autotune.estimate.trace_context import PredictionInput, step_context

# share of the device above which torch empties its cache and retries: figures are less certain
CROWDED = 0.9
NAMED_SHARE = 0.2  # share of the interval's width from which on a cause is named
CPU_PARTS = (
    *timeline.POLICY_PARTS,
    *timeline.OTHER_MODEL_PARTS,
    "kv_cache",
    "communication",
    "engine",
    "processes",
)


def predict(inputs: PredictionInput, stage: StepStage | None = None) -> Prediction:
    """Return memory and verdict, and speed if the device's is known."""
    return with_speed(inputs, memory(inputs, stage or stage_of(inputs)))


def stage_of(inputs: PredictionInput) -> StepStage:
    """Return the trace in this candidate's context, ready to be replayed."""
    return StepStage(inputs.trace, step_context(inputs))


def memory(inputs: PredictionInput, stage: StepStage) -> Prediction:
    """Return memory and verdict: functions of the composition and the context. `stage`: the
    trace in its context, possibly with other sizes than the trace's own.
    """
    if inputs.on_cpu:
        return _on_cpu(inputs, stage)
    return _on_gpu(inputs, stage)


def may_fit(inputs: PredictionInput, stage: StepStage) -> bool:
    """Return False if the requests, or the replay as traced, show that the candidate does not
    surely fit: less work than `memory`.
    """
    if inputs.on_cpu:
        return True
    room = _room(inputs)
    if stage.requested_bytes > room.low and not inputs.composition.offloaded_in_rollout:
        return False
    scene, start = _with_engine(inputs, _scene(inputs, stage.usage_as_traced()))
    if start.refusal is not None:
        return False
    points = timeline.timeline_points(scene)
    if timeline.verdict(highest(point.device_bytes for point in points), room):
        return True
    capacity = timeline.certain_capacity(scene, points, room)
    return capacity is not None and stage.fits_as_traced(capacity)


def peak_as_traced(inputs: PredictionInput, stage: StepStage) -> float:
    """Return the peak without a limit, from a single replay; endless if the engine would not
    start.
    """
    if inputs.on_cpu:
        return memory(inputs, stage).peak_memory_bytes.value
    scene, start = _with_engine(inputs, _scene(inputs, stage.usage_as_traced()))
    if start.certain_refusal is not None:
        return math.inf
    return timeline.peak(timeline.timeline_points(scene)).device_bytes.value


# On GPUs.


def _on_gpu(inputs: PredictionInput, stage: StepStage) -> Prediction:
    scene, start = _with_engine(inputs, _scene(inputs, stage.usage()))
    points = timeline.timeline_points(scene)
    room = _room(inputs)
    tight = None
    if timeline.peak(points).device_bytes.value > room.value:
        tight = timeline.squeezed(stage, scene, room)
    return _prediction(inputs, stage, scene, start, points, tight)


def _with_engine(inputs: PredictionInput, scene: Scene) -> tuple[Scene, _EngineStart]:
    start = _engine_start(inputs, scene)
    if start.engine is not None:
        share = EngineShare.of(start.engine, inputs.composition)
        scene = dataclasses.replace(scene, engine=share)
    return scene, start


def _scene(inputs: PredictionInput, stage_usage: TraceUsage) -> Scene:
    """Return the trainer and the other models, without the engine."""
    composition = inputs.composition
    gpu = inputs.gpu
    usage = _with_weights_back(stage_usage, composition)
    ranks = inputs.hardware.count if joins_server(composition) else composition.ranks
    at_engine_start = communicators_at_engine_start(composition)
    return Scene(
        usage=usage,
        trace=inputs.trace,
        composition=composition,
        context=catalog.context(gpu).scaled(composition.processes),
        communication=communication(gpu, ranks, communicators(composition)),
        communication_at_engine_start=communication(gpu, ranks, at_engine_start),
        outside_models=other_model_bytes(inputs.trace, composition, usage, inputs.config),
    )


def _with_weights_back(usage: TraceUsage, composition: Composition) -> TraceUsage:
    """Return the usage with a sync without an offloaded optimizer: the weights are back to be sent,
    its state is not.
    """
    offloaded = "optimizer" in composition.offloaded_in_rollout
    if not offloaded or composition.sync_gathers is None:
        return usage
    phases = []
    for use in usage.phases:
        if use.phase == "sync":
            use = use.without(("optimizer",))
        phases.append(use)
    return dataclasses.replace(usage, phases=tuple(phases))


def communicators(composition: Composition) -> int:
    """Return the number of a training rank's communicators that carry anything: the first operation
    allocates their buffers. One that is created and never used has none (NCCL from 2.22 on,
    `runtimeConn` in its init.cc).

    torch's default one; one in which ZeRO-1 and ZeRO-2 reduce (ZeRO-3 uses the default one); for an
    engine under tensor parallelism its own and, in the trainer's process, one in which its prompts
    are gathered; the one with a server, to which weights are sent.
    """
    engine, count = composition.engine, 0
    if composition.ranks > 1:
        count += 1
    if composition.sharded_by in ("zero1", "zero2"):
        count += 1
    if engine is not None and engine.tensor_parallel > 1:
        count += 1 if engine.apart else 2
    if joins_server(composition):
        count += 1
    return max(composition.processes, count)


def communicators_at_engine_start(composition: Composition) -> int:
    """Return the number when an engine in the trainer's process starts: the one with which
    ZeRO-3 loads its weights, and the engine's own. The first operation of the others comes
    later.
    """
    engine = composition.engine
    if engine is None or engine.apart:
        return communicators(composition)
    return (composition.sharded_by == "zero3") + (engine.tensor_parallel > 1)


def joins_server(composition: Composition) -> bool:
    """Return True if the trainer and a server, to which it sends weights, have a communicator."""
    return composition.generation == "server" and composition.split is not None


# The engine.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _EngineStart:
    """Engine on the training devices, and one on GPUs of its own."""

    engine: EngineUse | None = None
    uncertain: bool = False  # the ends of the other memory's interval disagree on its start
    split: EngineUse | None = None

    @property
    def refusal(self) -> str | None:
        return None if self.engine is None else self.engine.failure

    @property
    def certain_refusal(self) -> str | None:
        """Return the error of a start that surely fails."""
        if self.refusal is not None and not self.uncertain:
            return self.refusal
        if self.split is not None and self.split.sure:
            return self.split.failure
        return None

    @property
    def possible_refusal(self) -> str | None:
        return self.refusal if self.uncertain else None

    @property
    def cache(self) -> EngineFit | None:
        """Return the cache of the engine that generates."""
        use = self.engine or self.split
        return None if use is None else use.kv


def _engine_start(inputs: PredictionInput, scene: Scene) -> _EngineStart:
    """Fit the engine beside the other memory's value."""
    settings = inputs.composition.engine
    split = _split_engine(inputs)
    if settings is None:
        return _EngineStart(split=split)
    if settings.shares_weights:  # it loads them, and the trainer takes them from it
        return _EngineStart(engine=_fitted(inputs, round(scene.context.value)), split=split)
    other_memory = scene.context + Estimate.exactly(_trainer_at_engine_start(inputs, scene))
    low, middle, high = (
        _fitted(inputs, min(round(other_bytes), inputs.hardware.memory_bytes))
        for other_bytes in (other_memory.low, other_memory.value, other_memory.high)
    )
    uncertain = (low.failure is None) != (high.failure is None)
    return _EngineStart(
        engine=middle,
        uncertain=uncertain,
        split=split,
    )


def _trainer_at_engine_start(inputs: PredictionInput, scene: Scene) -> int:
    """Return the trainer's and the other models' bytes on the device."""
    loaded = scene.usage.loaded_bytes
    if inputs.composition.empties_before_engine:
        loaded = min(loaded, scene.usage.resting.allocated_bytes)
    other_models = sum(scene.outside_models.get("rollout", {}).values())
    return max(0, loaded + other_models - min(scene.away_bytes, loaded))


def _split_engine(inputs: PredictionInput) -> EngineUse | None:
    """Fit an engine that has GPUs of its own."""
    split = inputs.composition.split
    if split is None:
        return None
    context = catalog.context(inputs.gpu)
    use = _fitted(inputs, round(context.value), split.engine, split.dtype)
    if use.failure:
        return use
    room = _room(inputs).high - context.low - use.reserved_bytes.low
    failure = weight_sync.receiving_failure(inputs.composition, inputs.trace, room)
    if failure is None:
        return use
    return dataclasses.replace(use, failure=failure, sure=True)


def _fitted(
    inputs: PredictionInput,
    other_bytes: int,
    settings: EngineSettings | None = None,
    dtype: str | None = None,
) -> EngineUse:
    composition = inputs.composition
    settings = settings or composition.engine
    assert settings is not None
    adapter_rank = None
    if composition.syncs_adapter_only:
        adapter_rank = composition["policy"].adapter_rank
    return rollout_engine.fit(
        inputs.config,
        settings,
        dtype=dtype or composition["engine"].dtype,
        gpu=inputs.gpu,
        device_memory_bytes=inputs.hardware.memory_bytes,
        limit_bytes=inputs.limit_bytes,
        other_bytes=other_bytes,
        vllm=inputs.trace.versions.get("vllm"),
        on_cpu=inputs.on_cpu,
        adapter_rank=adapter_rank or 0,
    )


# The verdict.


def _prediction(
    inputs: PredictionInput,
    stage: StepStage,
    scene: Scene,
    start: _EngineStart,
    points: tuple[TimelinePoint, ...],
    tight: tuple[TimelinePoint, ...] | None,
) -> Prediction:
    """Return the prediction of these phases; `tight`: those within the room, if there are any."""
    retried = tight is not None
    points = tight or points
    composition = inputs.composition
    trace = inputs.trace
    # 1. The verdict.
    room = _room(inputs)
    top = timeline.peak(points)
    total = highest(point.device_bytes for point in points)
    failure = start.certain_refusal
    startup = start.possible_refusal
    fits = timeline.verdict(total, room)
    if failure is not None:
        fits = False
    if start.uncertain and fits is not False:
        fits = None
    capacity = None
    if fits is None and startup is None:
        capacity = timeline.certain_capacity(scene, points, room)
    if capacity is not None and stage.fits(capacity):
        fits = retried = True
        high = max(total.value, min(total.high, room.high))
        total = dataclasses.replace(total, high=high)
    depends_on: tuple[str, ...] = ()
    if fits is None:
        causes = deciding(scene, top, room, trace, engine_may_refuse=startup is not None)
        depends_on = tuple(causes)

    # 2. torch's own figures.
    in_torch = Estimate.exactly(_engine_in_torch(composition, start.engine))
    reserved = highest(point.torch_reserved for point in points)
    host = _processes(1).scaled(composition.ranks)
    host += Estimate.exactly(inputs.host_bytes * composition.ranks)
    return Prediction(
        candidate_id=inputs.candidate_id,
        basis=trace.basis,
        fits=fits,
        depends_on=depends_on,
        failure=failure,
        limit_bytes=inputs.limit_bytes,
        usable_bytes=room,
        peak_memory_bytes=total,
        training_devices=composition.ranks if joins_server(composition) else None,
        torch_peak_allocated_bytes=whole_bytes(_torch_allocated(scene) + in_torch),
        torch_peak_reserved_bytes=whole_bytes(reserved + in_torch),
        host_memory_bytes=whole_bytes(host),
        phases=timeline.phase_predictions(scene, points),
        breakdown=top.parts,
        engine=start.cache,
        effective=trace.effective,
        assumptions=(
            *_assumed(inputs, total, startup, retried=retried),
            *composition.notes,
            *trace.notes,
        ),
        versions=trace.versions,
    )


def _engine_in_torch(composition: Composition, engine: EngineUse | None) -> int:
    """Return what torch counts of an engine: weights and cache while they have addresses, also
    offloaded ones, and what stays in its pool.
    """
    settings = composition.engine
    if engine is None or settings is None:
        return 0
    if settings.apart and not settings.shares_weights:
        return 0
    return engine.weights_bytes + engine.parts.get("kv_cache", 0) + engine.standing_bytes


def _torch_allocated(scene: Scene) -> Estimate:
    """Return the peak that torch allocates for the trainer and the other models."""
    basis = scene.trace.basis
    extra_bytes = scene.trace.possible_extra_bytes
    allocated = []
    for use in scene.usage.phases:
        error = timeline.error_bytes(use, basis)
        policy = timeline.around(use.allocated_bytes, error, extra_bytes)
        other_models = timeline.other_models(scene.outside_models.get(use.phase, {}), basis)
        allocated.append(policy + other_models)
    return highest(allocated)


def _room(inputs: PredictionInput) -> Estimate:
    """Return the memory that a job may use: min(limit, memory that CUDA offers)."""
    offered = catalog.offered(inputs.hardware.memory_bytes, inputs.gpu)
    return offered.at_most(inputs.limit_bytes)


def _assumed(
    inputs: PredictionInput,
    peak: Estimate,
    startup: str | None,
    *,
    retried: bool,
) -> Iterator[str]:
    """Yield what the prediction assumes, for the reader."""
    composition = inputs.composition
    gpu = inputs.gpu
    trace = inputs.trace
    device_bytes = inputs.hardware.memory_bytes
    if gpu is None:
        yield (
            f"{inputs.hardware.name} is not in the catalogue: its CUDA context is known only"
            " roughly"
        )
    if retried:
        yield (
            "torch may reserve up to the limit, empty its cache and retry: slower, without failure"
        )
    elif CROWDED * device_bytes < peak.value <= device_bytes:
        yield (
            f"the peak is above {CROWDED:.0%} of the device, where torch empties its cache and"
            " retries: uncertain"
        )
    if composition.ranks > 1 and (gpu is None or gpu.link is None):
        yield "the GPU interconnect, which decides NCCL's buffers, is unknown"
    if startup is not None:
        yield f"the engine may refuse to start: {startup}"
    if composition.generation == "server" and composition.split is None:
        yield "the engine runs on other devices, which are not included"
    if trace.basis == "generic":
        yield "a generic step replaces the framework's own"
    if trace.high_extra_bytes:
        yield (
            f"up to {format_bytes(trace.high_extra_bytes)} more if tokens concentrate on few"
            " experts"
        )


def deciding(
    scene: Scene,
    top: TimelinePoint,
    room: Estimate,
    trace: Trace,
    *,
    engine_may_refuse: bool,
) -> Iterator[str]:
    """Yield the widest causes of the interval."""
    if engine_may_refuse:
        yield "free memory of the device when the engine starts"
    widths = _widths_by_cause(scene, top, room, trace)
    whole_width = sum(widths.values())
    wide_causes = []
    for cause, width in widths.items():
        if width > 0 and width >= NAMED_SHARE * whole_width:
            wide_causes.append((width, cause))
    for _, cause in sorted(wide_causes, reverse=True):
        yield cause
    if not wide_causes and not engine_may_refuse:
        yield "several uncertain figures, none of them dominant"


def _widths_by_cause(
    scene: Scene,
    top: TimelinePoint,
    room: Estimate,
    trace: Trace,
) -> dict[str, float]:
    """Return how much each cause adds to the interval at the peak."""
    use = scene.usage.resting
    for phase_use in scene.usage.phases:
        if phase_use.phase == top.phase:
            use = phase_use
            break
    generic = 0.0
    if scene.trace.basis == "generic":
        generic = _width(timeline.error_bytes(use, scene.trace.basis))
    fused = scene.composition.fused_parts
    saved = sum(size for part, size in use.parts.items() if part in fused)
    engine = 0.0
    if scene.engine is not None:
        engine = _width(scene.engine.held(top.phase))
    return {
        "size of the CUDA context and its kernels": _width(scene.context),
        "size of NCCL's buffers": _width(scene.communication),
        "fragmentation of torch's cache, which depends on the lengths of earlier batches": float(
            use.reserved_high_bytes - use.allocated_bytes
        ),
        "difference between the generic step and the framework's own": generic,
        "memory that the framework's fused kernels save": float(saved),
        "distribution of tokens over the experts": float(trace.high_extra_bytes),
        "engine memory beyond its share": engine,
        "memory reserved by the driver": _width(room),
    }


def _width(estimate: Estimate) -> float:
    return estimate.high - estimate.low


# On CPUs.


def _on_cpu(inputs: PredictionInput, stage: StepStage) -> Prediction:
    """Anonymous and shared memory of all processes together. Nothing is reserved or cached on a
    CPU. The processes themselves, known only roughly, weigh more than a small model, and an
    allocation counts only once it is written to: the interval is wide.
    """
    composition = inputs.composition
    trace = inputs.trace
    usage = stage.usage()
    engine = None
    uses = {use.phase: use for use in usage.phases}
    if composition.engine is not None:
        engine = _fitted(inputs, usage.loaded_bytes)
        uses.setdefault("rollout", usage.resting)
    other_models = other_model_bytes(trace, composition, usage, inputs.config)
    phases = []
    for phase in PHASES:
        if phase in uses:
            use = dataclasses.replace(uses[phase], phase=phase)
            phases.append(_phase_on_cpu(inputs, use, engine, other_models.get(phase, {})))

    total = highest(phase.peak_bytes for phase in phases)
    fits = timeline.verdict(total, Estimate.exactly(inputs.limit_bytes))
    requested = _requested_on_cpu(usage, other_models, trace)
    uncertain = ("memory of the processes and the C library's heap beside the tensors",)
    return Prediction(
        candidate_id=inputs.candidate_id,
        basis=trace.basis,
        fits=fits,
        depends_on=uncertain if fits is None else (),
        limit_bytes=inputs.limit_bytes,
        peak_memory_bytes=total,
        torch_peak_allocated_bytes=requested,
        torch_peak_reserved_bytes=requested,
        host_memory_bytes=total,
        phases=tuple(phases),
        breakdown=max(phases, key=lambda phase: phase.peak_bytes.value).parts,
        engine=None if engine is None else engine.kv,
        effective=trace.effective,
        assumptions=(
            "on a CPU the peak is that of all processes; tensors are one part of it",
            *trace.notes,
        ),
        versions=trace.versions,
    )


def _requested_on_cpu(
    usage: TraceUsage,
    other_models: Mapping[Phase, Mapping[str, int]],
    trace: Trace,
) -> Estimate:
    """Return one rank's peak, without a caching allocator: requested = allocated = reserved."""
    other_bytes = {}
    for use in usage.phases:
        parts = other_models.get(use.phase, {})
        other_bytes[use.phase] = timeline.other_models(parts, trace.basis)
    top = max(usage.phases, key=lambda use: use.requested_bytes + other_bytes[use.phase].value)
    error = timeline.error_bytes(top, trace.basis)
    policy = timeline.around(top.requested_bytes, error, trace.possible_extra_bytes)
    return whole_bytes(policy + other_bytes[top.phase])


def _processes(ranks: int) -> Estimate:
    """Bytes of the worker with its imports, which the ranks share, and of each rank's own pages."""
    return estimate("cpu_process_mib") + estimate("cpu_rank_mib").scaled(ranks)


def _phase_on_cpu(
    inputs: PredictionInput,
    use: PhaseUse,
    engine: EngineUse | None,
    other_models: Mapping[str, int],
) -> PhasePrediction:
    """Return the peak of all ranks together. `others`: models outside the step."""
    ranks = inputs.composition.ranks
    total = _tensors_on_cpu(inputs.trace, use, other_models).scaled(ranks) + _processes(ranks)
    parts: Counter[str] = Counter()
    for sizes in (use.parts, other_models):
        parts.update({str(name): size * ranks for name, size in sizes.items()})
    if engine is not None:
        engine_bytes = _engine_on_cpu(engine, inputs.composition).scaled(ranks)
        total += engine_bytes
        parts["engine"] = round(engine_bytes.value)
    parts["processes"] = round(total.value) - sum(parts.values())
    return PhasePrediction(
        name=use.phase,
        peak_bytes=whole_bytes(total),
        seconds=None,
        parts={name: parts[name] for name in CPU_PARTS if parts.get(name)},
    )


def _tensors_on_cpu(
    trace: Trace,
    use: PhaseUse,
    other_models: Mapping[str, int],
) -> Estimate:
    """Bytes of one rank's tensors, on the C library's heap."""
    other_bytes = timeline.other_models(other_models, trace.basis)
    tensors = use.requested_bytes + round(other_bytes.value)
    heap = percent("cpu_heap_percent").scaled(tensors)
    touched = tensors - use.largest_bytes  # a buffer can be larger than the part that is written
    low = max(0, touched + heap.low)
    high = tensors + heap.high + trace.possible_extra_bytes
    if trace.basis == "generic":
        error = percent("generic_error_percent").scaled(use.requested_bytes)
        low = max(0, low + error.low)
        high = high + error.high
    low += other_bytes.low - other_bytes.value
    high += other_bytes.high - other_bytes.value
    return Estimate(
        value=tensors,
        low=low,
        high=high,
    )


def _engine_on_cpu(engine: EngineUse, composition: Composition) -> Estimate:
    """Bytes of weights and imports, and the part of the cache that is written to."""
    imports = estimate("cpu_engine_mib")
    settings = composition.engine
    cache = engine.kv
    written = 0.0
    if cache is not None:
        written = cache.kv_cache_bytes.value
        if settings is not None and cache.kv_cache_tokens:
            most_tokens = settings.max_num_seqs * settings.max_model_length
            written = min(written, written / cache.kv_cache_tokens * most_tokens)
    return Estimate(
        value=engine.weights_bytes + imports.value + written,
        low=engine.weights_bytes + imports.low,
        high=engine.reserved_bytes.high + imports.high,
    )

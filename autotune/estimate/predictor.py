"""Prediction of one candidate: peaks, parts, speed, and whether it fits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

from autotune import catalog
from autotune.catalog import communication, estimate, percent
from autotune.core.composition import Composition, EngineSettings
from autotune.core.measurement import PHASES
from autotune.core.prediction import Estimate, PhasePrediction, Prediction, highest
from autotune.core.trace import Trace
from autotune.core.units import format_bytes
from autotune.estimate import insertion, rollout_engine, timeline
from autotune.estimate.other_models import other_model_bytes
from autotune.estimate.replay import PhaseUse, StepStage
from autotune.estimate.rollout_engine import EngineUse
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


def predict(given: PredictionInput, stage: StepStage | None = None) -> Prediction:
    """Return memory and verdict, and speed if the device's is known."""
    return with_speed(given, memory(given, stage or stage_of(given)))


def stage_of(given: PredictionInput) -> StepStage:
    """Return the trace in this candidate's context, ready to be replayed."""
    return StepStage(given.trace, step_context(given))


def memory(given: PredictionInput, stage: StepStage) -> Prediction:
    """Return memory and verdict: functions of the composition and the context. `stage`: the
    trace in its context, possibly with other sizes than the trace's own.
    """
    return _on_cpu(given, stage) if given.hardware.kind == "cpu" else _on_gpu(given, stage)


# On GPUs.


def _on_gpu(given: PredictionInput, stage: StepStage) -> Prediction:
    # 1. The trainer and the other models.
    composition, used = given.composition, stage.usage()
    if "optimizer" in composition.offloaded_in_rollout and composition.sync_gathers is not None:
        phases = [
            use.without(("optimizer",)) if use.phase == "sync" else use for use in used.phases
        ]
        used = dataclasses.replace(
            used, phases=tuple(phases)
        )  # weights are back to be sent, its state is not
    ranks = given.hardware.count if joins_server(composition) else composition.ranks
    scene = Scene(
        usage=used,
        trace=given.trace,
        composition=composition,
        context=catalog.context(given.gpu).scaled(composition.processes),
        communication=communication(given.gpu, ranks, communicators(composition)),
        communication_at_engine_start=communication(
            given.gpu, ranks, communicators_at_engine_start(composition)
        ),
        others=other_model_bytes(given.trace, composition, used, given.config),
    )
    # 2. The engine, in the memory that is left.
    engine, uncertain = _engine(given, scene)
    scene = dataclasses.replace(
        scene, engine=None if engine is None else EngineShare.of(engine, composition)
    )
    # 3. The phases; under pressure, those of an allocator with this capacity.
    points = timeline.timeline_points(scene)
    room, tight = _room(given), None
    if timeline.peak(points).device_bytes.value > room.value:
        tight = timeline.squeezed(stage, scene, room)
    return _prediction(
        given, stage, scene, tight or points, engine, uncertain=uncertain, retried=tight is not None
    )


def communicators(composition: Composition) -> int:
    """Return the number of a training rank's communicators that carry anything: the first operation
    allocates their buffers. One that is created and never used has none (NCCL from 2.22 on,
    `runtimeConn` in its init.cc).

    torch's default one; one in which ZeRO-1 and ZeRO-2 reduce (ZeRO-3 uses the default one); for an
    engine under tensor parallelism its own and, in the trainer's process, one in which its prompts
    are gathered; the one with a server, to which weights are sent.
    """
    engine = composition.engine
    own = (composition.ranks > 1) + (composition.sharded_by in ("zero1", "zero2"))
    of_engine = 0 if engine is None or engine.tensor_parallel == 1 else 2 - engine.apart
    return max(composition.processes, own + of_engine + joins_server(composition))


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


def _split_engine(given: PredictionInput) -> EngineUse | None:
    """Fit an engine that has GPUs of its own."""
    split = given.composition.split
    if split is None:
        return None
    context = catalog.context(given.gpu)
    use = _fitted(given, round(context.value), split.engine, split.dtype)
    room = _room(given).high - context.low - use.reserved_bytes.low
    failure = insertion.receiving_failure(given.composition, given.trace, room)
    return (
        use
        if use.failure or failure is None
        else dataclasses.replace(use, failure=failure, sure=True)
    )


def _engine(given: PredictionInput, scene: Scene) -> tuple[EngineUse | None, bool]:
    """Fit the engine beside the other memory's value; True if its start is uncertain: the ends
    of that memory disagree.
    """
    settings = given.composition.engine
    if settings is None:
        return None, False
    if settings.shares_weights:  # it loads them, and the trainer takes them from it
        return _fitted(given, round(scene.context.value)), False
    loaded = scene.usage.loaded_bytes
    if given.composition.empties_before_engine:
        loaded = min(loaded, scene.usage.resting.allocated_bytes)
    others = sum(scene.others.get("rollout", {}).values()) - min(scene.away_bytes, loaded)
    held = scene.context + Estimate.exactly(max(0, loaded + others))
    whole = given.hardware.memory_bytes  # upper bound of anything held
    low, middle, high = (
        _fitted(given, min(round(other), whole)) for other in (held.low, held.value, held.high)
    )
    return middle, (low.failure is None) != (high.failure is None)


def _fitted(
    given: PredictionInput,
    other_bytes: int,
    settings: EngineSettings | None = None,
    dtype: str | None = None,
) -> EngineUse:
    settings = settings or given.composition.engine
    assert settings is not None
    adapter_rank = (
        given.composition["policy"].adapter_rank if given.composition.syncs_adapter_only else None
    )
    return rollout_engine.fit(
        given.config,
        settings,
        dtype=dtype or given.composition["engine"].dtype,
        gpu=given.gpu,
        device_memory_bytes=given.hardware.memory_bytes,
        limit_bytes=given.limit_bytes,
        other_bytes=other_bytes,
        vllm=given.trace.versions.get("vllm"),
        on_cpu=given.hardware.kind == "cpu",
        adapter_rank=adapter_rank or 0,
    )


def _prediction(
    given: PredictionInput,
    stage: StepStage,
    scene: Scene,
    points: tuple[TimelinePoint, ...],
    engine: EngineUse | None,
    *,
    uncertain: bool,
    retried: bool,
) -> Prediction:
    # 1. The verdict.
    top, room = timeline.peak(points), _room(given)
    total = highest(point.device_bytes for point in points)
    refused = None if engine is None else engine.failure
    failure, startup = (None, refused) if uncertain else (refused, None)
    if (split := _split_engine(given)) is not None and split.sure:
        failure = failure or split.failure
    fits = False if failure is not None else timeline.verdict(total, room)
    if uncertain and fits is not False:
        fits = None
    if fits is None and startup is None and timeline.certainly_fits(stage, scene, points, room):
        fits, retried = True, True
        total = Estimate(
            value=total.value, low=total.low, high=max(total.value, min(total.high, room.high))
        )
    # 2. torch counts an engine's weights and cache while they have addresses, also offloaded ones.
    settings, in_torch = given.composition.engine, 0
    if (
        engine is not None
        and settings is not None
        and (settings.shares_weights or not settings.apart)
    ):
        in_torch = engine.weights_bytes + engine.parts.get("kv_cache", 0)
    basis, extra = scene.trace.basis, scene.trace.possible_extra_bytes
    allocated = [
        timeline.around(use.allocated_bytes, timeline.error_bytes(use, basis), extra)
        + timeline.other_models(scene.others.get(use.phase, {}), basis)
        for use in scene.usage.phases
    ]
    own_reserved = highest(point.torch_reserved for point in points)
    ranks = given.composition.ranks
    return Prediction(
        candidate_id=given.candidate_id,
        basis=given.trace.basis,
        fits=fits,
        depends_on=(
            tuple(deciding(scene, top, room, given.trace, engine_may_refuse=startup is not None))
            if fits is None
            else ()
        ),
        failure=failure,
        limit_bytes=given.limit_bytes,
        peak_memory_bytes=total,
        training_devices=ranks if joins_server(given.composition) else None,
        torch_peak_allocated_bytes=whole_bytes(highest(allocated) + Estimate.exactly(in_torch)),
        torch_peak_reserved_bytes=whole_bytes(own_reserved + Estimate.exactly(in_torch)),
        host_memory_bytes=whole_bytes(
            _processes(1).scaled(ranks) + Estimate.exactly(given.host_bytes * ranks)
        ),
        phases=timeline.phase_predictions(scene, points),
        breakdown=top.parts,
        engine=engine.kv if engine is not None else split.kv if split is not None else None,
        effective=given.trace.effective,
        assumptions=(
            *_assumed(given, total, room, startup, retried=retried),
            *given.composition.notes,
            *given.trace.notes,
        ),
        versions=given.trace.versions,
    )


def _room(given: PredictionInput) -> Estimate:
    """Return the memory that a job may use: min(limit, memory that CUDA offers)."""
    return catalog.offered(given.hardware.memory_bytes, given.gpu).at_most(given.limit_bytes)


def _assumed(
    given: PredictionInput, peak: Estimate, room: Estimate, startup: str | None, *, retried: bool
) -> Iterator[str]:
    device_bytes = given.hardware.memory_bytes
    if given.gpu is None:
        yield (
            f"{given.hardware.name} is not in the catalogue: its CUDA context is known only roughly"
        )
    if room.value < device_bytes and room.low < peak.high:
        by_driver = room.low < room.high  # the driver's part alone is uncertain; a limit is exact
        less = f"CUDA offers {format_bytes(device_bytes - room.value)} less than the device has"
        yield less if by_driver else "the limit is below what the device has"
    if retried:
        yield (
            "torch may reserve up to the limit, empty its cache and retry: slower, without failure"
        )
    elif CROWDED * device_bytes < peak.value <= device_bytes:
        yield (
            f"the peak is above {CROWDED:.0%} of the device, where torch empties its cache and"
            " retries: uncertain"
        )
    if given.composition.ranks > 1 and (given.gpu is None or given.gpu.link is None):
        yield "the GPU interconnect, which decides NCCL's buffers, is unknown"
    if startup is not None:
        yield f"the engine may refuse to start: {startup}"
    if given.composition.generation == "server" and given.composition.split is None:
        yield "the engine runs on other devices, which are not included"
    if given.trace.basis == "generic":
        yield "a generic step replaces the framework's own"
    if given.trace.high_extra_bytes:
        yield (
            f"up to {format_bytes(given.trace.high_extra_bytes)} more if tokens concentrate on few"
            " experts"
        )


def deciding(
    scene: Scene, top: TimelinePoint, room: Estimate, trace: Trace, *, engine_may_refuse: bool
) -> Iterator[str]:
    """Yield the widest causes of the interval."""
    if engine_may_refuse:
        yield "free memory of the device when the engine starts"
    use = next((use for use in scene.usage.phases if use.phase == top.phase), scene.usage.resting)
    errors = timeline.error_bytes(use, scene.trace.basis)
    fused = sum(size for part, size in use.parts.items() if part in scene.composition.fused_parts)
    widths = {
        "size of the CUDA context and its kernels": _width(scene.context),
        "size of NCCL's buffers": _width(scene.communication),
        "fragmentation of torch's cache, which depends on the lengths of earlier batches": float(
            use.reserved_high_bytes - use.allocated_bytes
        ),
        "difference between the generic step and the framework's own": (
            _width(errors) if scene.trace.basis == "generic" else 0.0
        ),
        "memory that the framework's fused kernels save": float(fused),
        "distribution of tokens over the experts": float(trace.high_extra_bytes),
        "engine memory beyond its share": (
            0.0 if scene.engine is None else _width(scene.engine.held(top.phase))
        ),
        "memory reserved by the driver": _width(room),
    }
    whole = sum(widths.values())
    named = sorted(
        ((width, cause) for cause, width in widths.items() if 0 < width >= NAMED_SHARE * whole),
        reverse=True,
    )
    yield from (cause for _, cause in named)
    if not named and not engine_may_refuse:
        yield "several uncertain figures, none of them dominant"


def _width(estimate: Estimate) -> float:
    return estimate.high - estimate.low


# On CPUs.


def _on_cpu(given: PredictionInput, stage: StepStage) -> Prediction:
    """Anonymous and shared memory of all processes together. Nothing is reserved or cached on a
    CPU. The processes themselves, known only roughly, weigh more than a small model, and an
    allocation counts only once it is written to: the interval is wide.
    """
    used = stage.usage()
    engine = None if given.composition.engine is None else _fitted(given, used.loaded_bytes)
    others = other_model_bytes(given.trace, given.composition, used, given.config)
    uses = {use.phase: use for use in used.phases}
    if engine is not None:
        uses.setdefault("rollout", used.resting)
    phases = tuple(
        _phase_on_cpu(
            given, dataclasses.replace(uses[phase], phase=phase), engine, others.get(phase, {})
        )
        for phase in PHASES
        if phase in uses
    )
    total = highest(phase.peak_bytes for phase in phases)
    fits = timeline.verdict(total, Estimate.exactly(given.limit_bytes))
    # Per rank, without a caching allocator: requested = allocated = reserved.
    basis = given.trace.basis
    beside = {
        use.phase: timeline.other_models(others.get(use.phase, {}), basis) for use in used.phases
    }
    top = max(used.phases, key=lambda use: use.requested_bytes + beside[use.phase].value)
    own = timeline.around(
        top.requested_bytes, timeline.error_bytes(top, basis), given.trace.possible_extra_bytes
    )
    requested = whole_bytes(own + beside[top.phase])
    return Prediction(
        candidate_id=given.candidate_id,
        basis=given.trace.basis,
        fits=fits,
        depends_on=(
            ()
            if fits is not None
            else ("memory of the processes and the C library's heap beside the tensors",)
        ),
        limit_bytes=given.limit_bytes,
        peak_memory_bytes=total,
        torch_peak_allocated_bytes=requested,
        torch_peak_reserved_bytes=requested,
        host_memory_bytes=total,
        phases=phases,
        breakdown=max(phases, key=lambda phase: phase.peak_bytes.value).parts,
        engine=None if engine is None else engine.kv,
        effective=given.trace.effective,
        assumptions=(
            "on a CPU the peak is that of all processes; tensors are one part of it",
            *given.trace.notes,
        ),
        versions=given.trace.versions,
    )


def _processes(ranks: int) -> Estimate:
    """Bytes of the worker with its imports, which the ranks share, and of each rank's own pages."""
    return estimate("cpu_process_mib") + estimate("cpu_rank_mib").scaled(ranks)


def _phase_on_cpu(
    given: PredictionInput, use: PhaseUse, engine: EngineUse | None, others: Mapping[str, int]
) -> PhasePrediction:
    """Return the peak of all ranks together. `others`: models outside the step."""
    ranks, trace = given.composition.ranks, given.trace
    other_bytes = timeline.other_models(others, trace.basis)
    # 1. Tensors of one rank.
    tensors = use.requested_bytes + round(other_bytes.value)
    heap = percent("cpu_heap_percent").scaled(tensors)
    touched = tensors - use.largest_bytes  # a buffer can be larger than the part that is written
    own = Estimate(
        value=tensors,
        low=max(0, touched + heap.low),
        high=tensors + heap.high + trace.possible_extra_bytes,
    )
    if trace.basis == "generic":
        error = percent("generic_error_percent").scaled(use.requested_bytes)
        own = Estimate(value=own.value, low=max(0, own.low + error.low), high=own.high + error.high)
    error = Estimate(
        value=0, low=other_bytes.low - other_bytes.value, high=other_bytes.high - other_bytes.value
    )
    # 2. All ranks, the engine, the processes.
    total = (own + error).scaled(ranks) + _processes(ranks)
    parts: Counter[str] = Counter()
    for held in (use.parts, others):
        parts.update({str(name): size * ranks for name, size in held.items()})
    if engine is not None:
        engine_bytes = _engine_on_cpu(engine, given.composition).scaled(ranks)
        total, parts["engine"] = total + engine_bytes, round(engine_bytes.value)
    parts["processes"] = round(total.value) - sum(parts.values())
    named = {name: parts[name] for name in CPU_PARTS if parts.get(name)}
    return PhasePrediction(name=use.phase, peak_bytes=whole_bytes(total), seconds=None, parts=named)


def _engine_on_cpu(engine: EngineUse, composition: Composition) -> Estimate:
    """Bytes of weights and imports, and the part of the cache that is written to."""
    imports, settings, kv = estimate("cpu_engine_mib"), composition.engine, engine.kv
    written = 0.0 if kv is None else kv.kv_cache_bytes.value
    if kv is not None and settings is not None and kv.kv_cache_tokens:
        written = min(
            written,
            written / kv.kv_cache_tokens * settings.max_num_seqs * settings.max_model_length,
        )
    low = engine.weights_bytes + imports.low
    return Estimate(
        value=engine.weights_bytes + imports.value + written,
        low=low,
        high=engine.reserved_bytes.high + imports.high,
    )

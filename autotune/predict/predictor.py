"""Predictor: from a trace and what stands around it to a Prediction: peaks, parts, and whether it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autotune.catalogue import Gpu
from autotune.composition import Composition
from autotune.hardware import Hardware
from autotune.measurement import Phase
from autotune.predict import engine as engines
from autotune.predict import on_cpu, pressure, shown, speed, timeline, wording
from autotune.predict.allocator import AllocatorSettings
from autotune.predict.around import Surroundings
from autotune.predict.beside import beside
from autotune.predict.engine import EngineUse
from autotune.predict.shown import Outside
from autotune.predict.surroundings import surroundings
from autotune.predict.timeline import EngineShare, Moment, Scene
from autotune.predict.usage import Stage, Usage
from autotune.prediction import Estimate, PhasePrediction, Prediction
from autotune.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One candidate on one kind of hardware, with everything that decides its memory."""

    candidate_id: str
    composition: Composition
    hardware: Hardware
    gpu: Gpu | None
    """What the catalogue knows of the hardware; None for a GPU it does not have, and for CPUs."""

    limit_bytes: int
    """Per GPU; on a CPU for all ranks together."""

    config: Mapping[str, object]
    """The model's config.json."""

    trace: Trace
    """One rank's, the worst's, already sharded."""

    stage: Stage | None = None
    """The trace amid its surroundings, where its sizes are others than those that the trace has."""

    settings: Mapping[str, object] = field(default_factory=dict)
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)
    host_bytes: int = 0
    """Per rank, what was moved to the host's memory."""

    notes: tuple[str, ...] = ()


def predict(situation: Situation) -> Prediction:
    """Memory and verdict, and speed where the device's is known."""
    return with_speed(situation, memory(situation))


def memory(situation: Situation) -> Prediction:
    """Memory and verdict. Of a candidate's settings only what is in its composition and in its surroundings decides them."""
    return _on_cpu(situation) if situation.hardware.kind == "cpu" else _on_gpu(situation)


def with_speed(situation: Situation, memory: Prediction) -> Prediction:
    """The same with its speed, where the device's is known."""
    whole = speed.predicted(
        memory,
        situation.trace,
        situation.composition,
        gpu=situation.gpu,
        config=situation.config,
        iterations=_count(situation.settings.get("num_iterations")),
        num_generations=_count(situation.settings.get("num_generations")),
    )
    return dataclasses.replace(whole, tokens_per_second=None) if situation.composition.generation == "none" else whole


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def stage_of(situation: Situation) -> Stage:
    """The trace amid this candidate's surroundings, to be replayed."""
    return situation.stage or Stage(situation.trace, surroundings_of(situation))


def surroundings_of(situation: Situation) -> Surroundings:
    """What stands around this candidate's step."""
    return surroundings(
        situation.composition,
        situation.config,
        gpu=situation.gpu,
        trace=situation.trace,
        settings=situation.settings,
        allocator=situation.allocator,
        on_cpu=situation.hardware.kind == "cpu",
    )


# On GPUs.


def _on_gpu(situation: Situation) -> Prediction:
    situation = dataclasses.replace(situation, stage=stage_of(situation))
    used = stage_of(situation).usage()
    outside = _outside(situation)
    around = beside(situation.trace, situation.composition, used, situation.config)
    scene = Scene(
        usage=used,
        basis=situation.trace.basis,
        high_extra_bytes=situation.trace.high_extra_bytes,
        outside=outside,
        beside=around,
        away=situation.composition.away_in_rollout,
        spared=situation.composition.spared,
    )
    engine = _engine(situation, scene)
    scene = dataclasses.replace(scene, engine=None if engine is None else _share(engine.use, situation.composition))
    moments = timeline.moments(scene)
    tight = None
    if timeline.peak(moments).shown.value > _room(situation).value:
        tight = pressure.squeezed(stage_of(situation), scene, _room(situation))
    return _prediction(situation, scene, tight or moments, engine, retried=tight is not None)


def _outside(situation: Situation) -> Outside:
    composition = situation.composition
    tensor_parallel = composition.engine is not None and composition.engine.tensor_parallel > 1
    alone = shown.outside(situation.gpu, composition.ranks, communicators=max(composition.processes, 2 if tensor_parallel else 1))
    return dataclasses.replace(alone, context=alone.context.scaled(composition.processes))


@dataclass(frozen=True, kw_only=True)
class _Engine:
    use: EngineUse
    uncertain: bool
    """Whether it starts depends on what else the device holds, which is known only within an interval."""

    apart: bool = False
    """In a process of its own."""


def _engine(situation: Situation, scene: Scene) -> _Engine | None:
    """The engine as it would find the device, by the middle of the interval and by its ends."""
    if situation.composition.engine is None:
        return None
    if situation.composition.engine.shares_weights:  # it loads them, and the trainer takes them from it
        alone = _fitted(situation, round(scene.outside.context.value))
        return _Engine(use=alone, uncertain=False)
    others = sum(scene.beside.get("rollout", {}).values()) - min(scene.away_bytes, scene.usage.loaded_bytes)
    held = scene.outside.context + Estimate.exactly(max(0, scene.usage.loaded_bytes + others))
    whole = situation.hardware.memory_bytes  # more than that nothing holds
    low, middle, high = (_fitted(situation, min(round(other), whole)) for other in (held.low, held.value, held.high))
    return _Engine(
        use=middle,
        uncertain=(low.failure is None) != (high.failure is None),
        apart=situation.composition.engine.apart,
    )


def _fitted(situation: Situation, other_bytes: int) -> EngineUse:
    settings = situation.composition.engine
    assert settings is not None
    return engines.fit(
        situation.config,
        dtype=situation.composition["engine"].dtype,
        gpu=situation.gpu,
        device_memory_bytes=situation.hardware.memory_bytes,
        utilization=settings.utilization,
        max_model_length=settings.max_model_length,
        max_num_seqs=settings.max_num_seqs,
        tensor_parallel=settings.tensor_parallel,
        sleep=settings.sleep,
        eager=settings.eager,
        other_bytes=other_bytes,
        quantised_bits=settings.quantised_bits,
        max_num_batched_tokens=settings.max_num_batched_tokens or engines.TRL_BATCHED_TOKENS,
        on_cpu=situation.hardware.kind == "cpu",
    )


def _share(use: EngineUse, composition: Composition) -> EngineShare:
    """Its passes' activations come out of the cache that it shares with the trainer; the rest stands on its own."""
    apart = composition.engine is not None and composition.engine.apart
    passing = 0 if apart else use.parts.get("activations", 0)
    awake = use.reserved_bytes
    cache = use.parts.get("kv_cache", 0)
    asleep = use.asleep_bytes
    if composition.engine is not None and composition.engine.shares_weights:
        awake, asleep = _without(awake, use.weights_bytes), Estimate.exactly(0)
    value = max(0.0, awake.value - passing)
    standing = Estimate(value=value, low=min(value, awake.low), high=max(value, awake.high - passing))
    loading = (
        Estimate(value=value - cache, low=max(0.0, standing.low - cache), high=standing.high - cache)
        if value >= cache
        else standing
    )
    return EngineShare(
        awake=standing,
        loading=loading,
        asleep=asleep,
        kv_cache_bytes=cache,
        weights_bytes=use.weights_bytes,
        passing_bytes=passing,
        sleeps=composition.engine is not None and composition.engine.sleep,
        wakes_whole=composition.engine is not None and composition.engine.wakes_whole,
    )


def _without(estimate: Estimate, size: int) -> Estimate:
    return Estimate(value=max(0.0, estimate.value - size), low=max(0.0, estimate.low - size), high=max(0.0, estimate.high - size))


def _prediction(
    situation: Situation, scene: Scene, moments: tuple[Moment, ...], engine: _Engine | None, *, retried: bool
) -> Prediction:
    top = timeline.peak(moments)
    total = shown.highest([moment.shown for moment in moments])
    failure = engine.use.failure if engine is not None and not engine.uncertain else None
    room = _room(situation)
    fits = False if failure is not None else shown.verdict(total, room)
    if engine is not None and engine.uncertain and fits is not False:
        fits = None
    startup = engine.use.failure if engine is not None and engine.uncertain else None
    if fits is None and startup is None and pressure.certainly_goes_through(stage_of(situation), scene, moments, room):
        fits, retried = True, True
        total = Estimate(value=total.value, low=total.low, high=max(total.value, min(total.high, room.high)))
    return Prediction(
        candidate_id=situation.candidate_id,
        basis=situation.trace.basis,
        fits=fits,
        depends_on=tuple(wording.deciding(scene, top, room, engine_may_refuse=startup is not None)) if fits is None else (),
        failure=failure,
        limit_bytes=situation.limit_bytes,
        peak_memory_bytes=total,
        torch_peak_allocated_bytes=_torch_allocated(scene, engine),
        torch_peak_reserved_bytes=_torch_reserved(moments, engine),
        host_memory_bytes=_host(situation),
        phases=tuple(moment.prediction for moment in moments),
        breakdown=top.parts,
        engine=None if engine is None else engine.use.kv,
        effective=situation.trace.effective,
        assumptions=(
            *_assumed(situation, total, room, startup, retried=retried),
            *situation.composition.notes,
            *situation.trace.notes,
            *situation.notes,
        ),
        versions=situation.trace.versions,
    )


def _room(situation: Situation) -> Estimate:
    """What a job may show: the limit, or what CUDA offers of the device where that is less."""
    offered = shown.offered(situation.hardware.memory_bytes, situation.gpu)
    limit = situation.limit_bytes
    return Estimate(value=min(limit, offered.value), low=min(limit, offered.low), high=min(limit, offered.high))


def _assumed(situation: Situation, peak: Estimate, room: Estimate, startup: str | None, *, retried: bool) -> Iterator[str]:
    if situation.gpu is None:
        yield f"{situation.hardware.name} is not in the catalogue, so its context is known only roughly"
    yield from wording.crowding(peak, room, situation.hardware.memory_bytes, retried=retried)
    if situation.composition.ranks > 1 and (situation.gpu is None or situation.gpu.link is None):
        yield "how the GPUs are linked is not known, which decides NCCL's buffers"
    if startup is not None:
        yield f"the engine may refuse to start: {startup}"
    if situation.composition.generation == "server":
        yield "the engine runs on other devices, which are not looked at"
    yield from wording.stand_ins(situation.trace)


def _torch_allocated(scene: Scene, engine: _Engine | None) -> Estimate:
    """torch counts an engine's weights and cache for as long as they have addresses, asleep or not."""
    own = shown.highest(
        [
            shown.allocated(use, scene.basis, scene.high_extra_bytes) + shown.beside(scene.beside.get(use.phase, {}), scene.basis)
            for use in scene.usage.phases
        ]
    )
    return _rounded(own + _engine_in_torch(engine))


def _torch_reserved(moments: tuple[Moment, ...], engine: _Engine | None) -> Estimate:
    return _rounded(shown.highest([moment.torch_reserved for moment in moments]) + _engine_in_torch(engine))


def _engine_in_torch(engine: _Engine | None) -> Estimate:
    if engine is None or engine.apart:
        return Estimate.exactly(0)
    return Estimate.exactly(engine.use.weights_bytes + engine.use.parts.get("kv_cache", 0))


def _host(situation: Situation) -> Estimate | None:
    """All ranks' processes on this machine, with what was offloaded to it."""
    ranks = situation.composition.ranks
    processes = on_cpu.processes(1).scaled(ranks)
    return _rounded(processes + Estimate.exactly(situation.host_bytes * ranks))


# On CPUs.


def _on_cpu(situation: Situation) -> Prediction:
    used = stage_of(situation).usage()
    engine = None if situation.composition.engine is None else _fitted(situation, used.loaded_bytes)
    around = beside(situation.trace, situation.composition, used, situation.config)
    scene = on_cpu.OnCpu(
        usage=used,
        composition=situation.composition,
        basis=situation.trace.basis,
        high_extra_bytes=situation.trace.high_extra_bytes,
        engine=engine,
        beside=around,
    )
    phases = on_cpu.phases(scene)
    total = shown.highest([phase.peak_bytes for phase in phases])
    fits = shown.verdict(total, Estimate.exactly(situation.limit_bytes))
    return Prediction(
        candidate_id=situation.candidate_id,
        basis=situation.trace.basis,
        fits=fits,
        depends_on=() if fits is not None else ("what the processes and the C library's heap take beside the tensors",),
        limit_bytes=situation.limit_bytes,
        peak_memory_bytes=total,
        torch_peak_allocated_bytes=_requested(used, situation, around),
        torch_peak_reserved_bytes=_requested(used, situation, around),
        host_memory_bytes=total,
        phases=phases,
        breakdown=_top(phases).parts,
        engine=None if engine is None else engine.kv,
        effective=situation.trace.effective,
        assumptions=(
            "on a CPU the peak is that of all processes together, of which the tensors are one part",
            *situation.trace.notes,
            *situation.notes,
        ),
        versions=situation.trace.versions,
    )


def _requested(used: Usage, situation: Situation, around: Mapping[Phase, Mapping[str, int]]) -> Estimate:
    """Per rank: a CPU has no caching allocator, so what is requested is what is allocated and reserved."""
    basis = situation.trace.basis
    besides = {use.phase: shown.beside(around.get(use.phase, {}), basis) for use in used.phases}
    top = max(used.phases, key=lambda use: use.requested_bytes + besides[use.phase].value)
    at, error = top.requested_bytes, shown.error_bytes(top, basis)
    own = Estimate(value=at, low=max(0, at + error.low), high=at + error.high + situation.trace.high_extra_bytes)
    return _rounded(own + besides[top.phase])


def _top(phases: tuple[PhasePrediction, ...]) -> PhasePrediction:
    return max(phases, key=lambda phase: phase.peak_bytes.value)


def _rounded(estimate: Estimate) -> Estimate:
    value = round(estimate.value)
    return Estimate(value=value, low=min(value, round(estimate.low)), high=max(value, round(estimate.high)))

"""Peak memory where the devices are CPUs: the anonymous and shared memory of all processes together.

Nothing is reserved and nothing is cached on a CPU, but the processes themselves weigh more than a small model, and that part
is known only roughly; and memory that was asked for counts only once it is written to. So the interval is wide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.composition import Composition
from autotune.measurement import PHASES, Phase
from autotune.predict import constants, shown
from autotune.predict.engine import EngineUse
from autotune.predict.timeline import BESIDE
from autotune.predict.usage import PhaseUse, Usage
from autotune.prediction import Basis, Estimate, PhasePrediction

PARTS = (
    "weights", "adapters", "gradients", "optimizer", "activations", "logits", "workspaces", "inputs", *BESIDE,
    "kv_cache", "communication", "engine", "processes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OnCpu:
    """What all ranks of one machine hold."""

    usage: Usage
    composition: Composition
    basis: Basis
    high_extra_bytes: int
    engine: EngineUse | None
    beside: Mapping[Phase, Mapping[str, int]] = field(default_factory=dict)
    """Models that the step does not run over but that are there, by phase and part."""


def phases(scene: OnCpu) -> tuple[PhasePrediction, ...]:
    uses = {use.phase: use for use in scene.usage.phases}
    if scene.engine is not None:
        uses.setdefault("rollout", scene.usage.resting)
    return tuple(_phase(scene, phase, uses[phase]) for phase in PHASES if phase in uses)


def processes(ranks: int) -> Estimate:
    """The keeper with its imports, which the ranks share, and what each rank makes its own."""
    return constants.estimate("cpu_process_mib") + constants.estimate("cpu_rank_mib").scaled(ranks)


def _phase(scene: OnCpu, phase: Phase, use: PhaseUse) -> PhasePrediction:
    ranks = scene.composition.ranks
    beside = scene.beside.get(phase, {})
    around = shown.beside(beside, scene.basis)
    tensors = use.requested_bytes + round(around.value)
    heap = constants.percent("cpu_heap_percent").scaled(tensors)
    touched = tensors - use.largest_bytes  # a buffer that is larger than what is written into it
    own = Estimate(value=tensors, low=max(0, touched + heap.low), high=tensors + heap.high + scene.high_extra_bytes)
    if scene.basis == "generic":
        wrong = constants.percent("generic_error_percent").scaled(use.requested_bytes)
        own = Estimate(value=own.value, low=max(0, own.low + wrong.low), high=own.high + wrong.high)
    doubt = Estimate(value=0, low=around.low - around.value, high=around.high - around.value)
    total = (own + doubt).scaled(ranks) + processes(ranks)
    parts: Counter[str] = Counter()
    for held in (use.parts, beside):
        parts.update({str(name): size * ranks for name, size in held.items()})
    if scene.engine is not None:
        engine = _engine(scene.engine, scene.composition).scaled(ranks)
        total, parts["engine"] = total + engine, round(engine.value)
    parts["processes"] = round(total.value) - sum(parts.values())
    return PhasePrediction(
        name=phase, peak_bytes=_whole(total), seconds=None, parts={name: parts[name] for name in PARTS if parts.get(name)}
    )


def _engine(engine: EngineUse, composition: Composition) -> Estimate:
    """Its weights and imports for certain; of its cache, as much as has been written to."""
    imports = constants.estimate("cpu_engine_mib")
    cache = 0.0 if engine.kv is None else engine.kv.kv_cache_bytes.value
    settings = composition.engine
    wanted = cache if engine.kv is None or settings is None or not engine.kv.kv_cache_tokens else min(
        cache, cache / engine.kv.kv_cache_tokens * settings.max_num_seqs * settings.max_model_length
    )  # fmt: skip
    low = engine.weights_bytes + imports.low
    return Estimate(value=engine.weights_bytes + imports.value + wanted, low=low, high=engine.reserved_bytes.high + imports.high)


def _whole(estimate: Estimate) -> Estimate:
    value = round(estimate.value)
    return Estimate(value=value, low=min(value, round(estimate.low)), high=max(value, round(estimate.high)))

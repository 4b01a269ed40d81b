"""Peak memory on CPUs: anonymous and shared memory of all processes together.

Nothing is reserved or cached on a CPU. The processes themselves, known only roughly, weigh more
than a small model, and an allocation counts only once it is written to: the interval is wide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autotune.core.composition import Composition
from autotune.core.measurement import PHASES, Phase
from autotune.core.prediction import Estimate, PhasePrediction
from autotune.core.trace import Trace
from autotune.estimate.constant_estimates import estimate, percent
from autotune.estimate.replay import PhaseUse
from autotune.estimate.timeline import OTHER_MODEL_PARTS, POLICY_PARTS, other_models, whole_bytes
from autotune.estimate.trace_context import TraceUsage
from autotune.estimate.vllm_engine import EngineUse

PARTS = (*POLICY_PARTS, *OTHER_MODEL_PARTS, "kv_cache", "communication", "engine", "processes")


def phases(
    used: TraceUsage, trace: Trace, composition: Composition, engine: EngineUse | None, others: Mapping[Phase, Mapping[str, int]]
) -> tuple[PhasePrediction, ...]:
    """Return the peaks of all ranks together. `others`: models outside the step."""
    uses = {use.phase: use for use in used.phases}
    if engine is not None:
        uses.setdefault("rollout", used.resting)
    return tuple(
        _phase(phase, uses[phase], trace, composition, engine, others.get(phase, {})) for phase in PHASES if phase in uses
    )


def processes(ranks: int) -> Estimate:
    """Bytes of the worker with its imports, which the ranks share, and of each rank's own pages."""
    return estimate("cpu_process_mib") + estimate("cpu_rank_mib").scaled(ranks)


def _phase(
    phase: Phase, use: PhaseUse, trace: Trace, composition: Composition, engine: EngineUse | None, others: Mapping[str, int]
) -> PhasePrediction:
    ranks = composition.ranks
    other_bytes = other_models(others, trace.basis)
    # 1. Tensors of one rank.
    tensors = use.requested_bytes + round(other_bytes.value)
    heap = percent("cpu_heap_percent").scaled(tensors)
    touched = tensors - use.largest_bytes  # a buffer can be larger than the part that is written
    own = Estimate(value=tensors, low=max(0, touched + heap.low), high=tensors + heap.high + trace.possible_extra_bytes)
    if trace.basis == "generic":
        error = percent("generic_error_percent").scaled(use.requested_bytes)
        own = Estimate(value=own.value, low=max(0, own.low + error.low), high=own.high + error.high)
    error = Estimate(value=0, low=other_bytes.low - other_bytes.value, high=other_bytes.high - other_bytes.value)
    # 2. All ranks, the engine, the processes.
    total = (own + error).scaled(ranks) + processes(ranks)
    parts: Counter[str] = Counter()
    for held in (use.parts, others):
        parts.update({str(name): size * ranks for name, size in held.items()})
    if engine is not None:
        engine_bytes = _engine(engine, composition).scaled(ranks)
        total, parts["engine"] = total + engine_bytes, round(engine_bytes.value)
    parts["processes"] = round(total.value) - sum(parts.values())
    return PhasePrediction(
        name=phase, peak_bytes=whole_bytes(total), seconds=None, parts={name: parts[name] for name in PARTS if parts.get(name)}
    )


def _engine(engine: EngineUse, composition: Composition) -> Estimate:
    """Bytes of weights and imports, and the part of the cache that is written to."""
    imports, settings, kv = estimate("cpu_engine_mib"), composition.engine, engine.kv
    written = 0.0 if kv is None else kv.kv_cache_bytes.value
    if kv is not None and settings is not None and kv.kv_cache_tokens:
        written = min(written, written / kv.kv_cache_tokens * settings.max_num_seqs * settings.max_model_length)
    low = engine.weights_bytes + imports.low
    return Estimate(value=engine.weights_bytes + imports.value + written, low=low, high=engine.reserved_bytes.high + imports.high)

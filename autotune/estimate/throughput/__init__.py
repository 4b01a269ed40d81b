"""Speed: seconds of each phase of a generation cycle, and tokens per second.

Work on a GPU is bound by arithmetic, by memory, or by the host that launches it. Exchanges between
ranks overlap with the backward pass as far as they can. The intervals are wide; a search corrects
them with measured values (`autotune.search`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.catalog import Gpu
from autotune.catalog.efficiency import efficiency
from autotune.core.composition import Composition
from autotune.core.measurement import PHASES, Phase
from autotune.core.prediction import EngineFit, Estimate, Prediction
from autotune.core.trace import Inventory, Trace, Work
from autotune.estimate import model_shape
from autotune.estimate.throughput import generation, roofline
from autotune.estimate.throughput.generation import MICRO, MILLI, GenerationLoad
from autotune.estimate.throughput.roofline import Ceilings, longer

BATCH_PHASES: frozenset[Phase] = frozenset({"rollout", "reward", "score", "sync"})
"""Phases that run once per batch of completions."""

EXPOSED_SHARE = 0.2
"""Share of the exchanges that is expected not to overlap with the backward pass, at least."""


@dataclass(frozen=True, kw_only=True)
class CycleTime:
    """Repetitions of the traced work in one cycle."""

    micro_steps: int  # per rank
    optimizer_steps: int
    traced_micro_steps: int  # of the optimizer step whose work was counted
    scored: float  # repetitions of the counted scoring


def with_throughput(
    prediction: Prediction,
    trace: Trace,
    composition: Composition,
    *,
    gpu: Gpu | None,
    config: Mapping[str, object],
    iterations: int = 1,
    num_generations: int = 1,
) -> Prediction:
    """Add seconds by phase and tokens per second; unchanged for a CPU or a GPU of unknown speed."""
    device = None if gpu is None else roofline.ceilings(gpu)
    if device is None:
        return prediction
    seconds = cycle(
        trace,
        composition,
        device=device,
        config=config,
        engine=prediction.engine,
        iterations=iterations,
        num_generations=num_generations,
    )
    phases = tuple(dataclasses.replace(phase, seconds=seconds.get(phase.name)) for phase in prediction.phases)
    return dataclasses.replace(prediction, phases=phases, tokens_per_second=tokens_per_second(seconds, composition))


def cycle(
    trace: Trace,
    composition: Composition,
    *,
    device: Ceilings,
    config: Mapping[str, object],
    engine: EngineFit | None = None,
    iterations: int = 1,
    num_generations: int = 1,
) -> Mapping[Phase, Estimate]:
    """Return seconds of one generation cycle by phase. `reward` and `load` cannot be predicted."""
    # 1. Traced phases, repeated as often as a cycle does.
    counts = counted(trace, composition, iterations=iterations)
    seconds: dict[Phase, Estimate] = {}
    for work in trace.work:
        if work.phase not in ("load", "reward"):
            seconds[work.phase] = phase_seconds(work, device).scaled(_repeats(work.phase, counts))
    # 2. Exchanges between ranks, beside the backward pass.
    seconds = _with_exchanges(seconds, trace.inventory, composition, counts, device)
    # 3. Generation and weight sync.
    if composition.generation != "none":
        load = _generation_load(composition, config, engine, num_generations)
        generated, layers = generation.seconds(load, device), len(model_shape.shape(config).layers)
        rollout = generation.with_gathering(generated, trace.inventory, composition, load, layers, device)
        if rollout is not None:
            seconds["rollout"] = rollout
    if composition.generation in ("engine", "server"):
        seconds["sync"] = _sync(trace.inventory, composition, config, device)
    return {phase: seconds[phase] for phase in PHASES if phase in seconds}


def phase_seconds(work: Work, device: Ceilings) -> Estimate:
    """max(arithmetic + memory, launches by the host) of one traced phase."""
    busy = roofline.compute_seconds(work.flops, device) + roofline.memory_seconds(work.moved_bytes, device)
    return longer(busy, roofline.overhead_seconds(work.kernels, efficiency("launch_microseconds"), MICRO))


def tokens_per_second(seconds: Mapping[Phase, Estimate], composition: Composition) -> Estimate | None:
    """Completion tokens of all ranks per second of a whole cycle; None without a rollout."""
    tokens = composition.generation_batch * composition.completion_length
    if "rollout" not in seconds:
        return None
    total = sum(seconds.values(), start=Estimate.exactly(0))
    if not tokens or total.low <= 0:
        return None
    return Estimate(value=tokens / total.value, low=tokens / total.high, high=tokens / total.low)


def counted(trace: Trace, composition: Composition, *, iterations: int = 1) -> CycleTime:
    """Return the repetitions. Without completions, a cycle is one optimizer step."""
    micro_steps = composition.accumulation
    if composition.generation != "none":
        micro_steps = iterations * max(1, composition.generation_batch // (composition.ranks * composition.micro_batch))
    traced = traced_micro_steps(trace)
    whole_batches = traced_batches(trace) if trace.basis == "traced" and composition.generation != "none" else 0
    return CycleTime(
        micro_steps=micro_steps,
        optimizer_steps=max(1, micro_steps // composition.accumulation),
        traced_micro_steps=traced,
        scored=1 / whole_batches if whole_batches else micro_steps / traced / iterations,
    )


def traced_micro_steps(trace: Trace) -> int:
    """Backward passes in the last traced step."""
    phases = trace.last_step
    return max(1, sum(1 for before, now in zip(["load", *phases], phases, strict=False) if now == "backward" != before))


def traced_batches(trace: Trace) -> int:
    """Batches of completions scored in the last traced step: runs of `BATCH_PHASES`."""
    making = [phase in BATCH_PHASES for phase in trace.last_step]
    return sum(1 for before, now in zip([False, *making], making, strict=False) if now and not before)


def _repeats(phase: Phase, counts: CycleTime) -> float:
    if phase == "optimizer":
        return counts.optimizer_steps
    return counts.scored if phase in BATCH_PHASES else counts.micro_steps / counts.traced_micro_steps


def _with_exchanges(
    seconds: dict[Phase, Estimate], inventory: Inventory, composition: Composition, counts: CycleTime, device: Ceilings
) -> dict[Phase, Estimate]:
    """Add the exchanges that do not overlap with the backward pass: between none and all."""
    sent = exchanged_bytes(inventory, composition, counts)
    spent = roofline.link_seconds(sent, device) if sent else None
    if spent is None or "backward" not in seconds:
        return seconds
    cover = seconds["backward"]
    low = max(0.0, spent.low - cover.high)
    value = max(low, spent.value - cover.value, EXPOSED_SHARE * spent.value)
    return {**seconds, "backward": cover + Estimate(value=value, low=low, high=max(value, spent.high))}


def exchanged_bytes(inventory: Inventory, composition: Composition, counts: CycleTime) -> float:
    """Bytes that one rank sends in a cycle.

    w, g: weight and gradient bytes · (ranks - 1) / ranks; m: micro-steps; s: optimizer steps.
    FSDP, ZeRO-3: m · (2w + g), two gathers; ZeRO-2: m · g + s · g; else 2 · s · g.
    """
    ranks, kind = composition.ranks, composition.sharded_by
    ring = (ranks - 1) / ranks
    weights, gradients = inventory.weight_bytes * ring, inventory.trainable_bytes * ring
    if ranks == 1:
        return 0.0
    if kind in generation.SHARDS_WEIGHTS:
        return counts.micro_steps * (2 * weights + gradients)
    if kind == "zero2":
        return counts.micro_steps * gradients + counts.optimizer_steps * gradients
    return counts.optimizer_steps * 2 * gradients


def _generation_load(
    composition: Composition, config: Mapping[str, object], engine: EngineFit | None, num_generations: int
) -> GenerationLoad:
    settings = composition.engine
    tensor_parallel = settings.tensor_parallel if settings is not None else 1
    sequences = max(1, composition.generation_batch * tensor_parallel // composition.ranks)
    batch = min(sequences, composition.generation_micro_batch or sequences if settings is None else settings.max_num_seqs)
    if engine is not None:
        batch = max(1, min(batch, int(engine.concurrency)))
    return GenerationLoad(
        config=config,
        dtype=composition["policy"].dtype,
        sequences=sequences,
        prompts=max(1, sequences // num_generations),
        prompt_length=composition.prompt_length,
        completion_length=composition.completion_length,
        batch=batch,
        by_engine=composition.generation in ("engine", "server"),
        tensor_parallel=tensor_parallel,
        quantised_bits=settings.quantised_bits if settings is not None else None,
    )


def _sync(inventory: Inventory, composition: Composition, config: Mapping[str, object], device: Ceilings) -> Estimate:
    """Read and write every weight (with adapters three times) + host time per parameter."""
    merged = composition["policy"].adapter_rank is not None
    copies = roofline.memory_seconds((6.0 if merged else 2.0) * inventory.weight_bytes, device)
    shape = model_shape.shape(config)
    # Matrices and norms of a layer; the model itself counts biases and experts: a low middle.
    names_per_layer = 12 if any(layer.experts for layer, _ in shape.kinds) else 9
    names = len(shape.layers) * names_per_layer + 3
    return copies + roofline.overhead_seconds(names, efficiency("push_milliseconds_per_parameter"), MILLI)

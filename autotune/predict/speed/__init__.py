"""Speed: seconds of each phase of a generation cycle, and tokens per second, from counted work and a device's ceilings.

Work on a GPU is bound by its arithmetic, its memory, or the host that launches it; exchanges between ranks hide behind the
backward pass as far as they can. The intervals are wide and say so: what a search measures corrects them (`autotune.study`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.catalogue import Gpu
from autotune.catalogue.efficiency import efficiency
from autotune.composition import Composition
from autotune.measurement import PHASES, Phase
from autotune.predict import shapes
from autotune.predict.speed import decoding
from autotune.predict.speed.ceilings import Ceilings, ceilings, computing, crossing, each, longer, moving
from autotune.predict.speed.decoding import MICRO, MILLI, Writing
from autotune.predict.speed.gathering import with_gathering
from autotune.prediction import EngineFit, Estimate, Prediction
from autotune.trace import Inventory, Trace, Work

MAKING_A_BATCH: frozenset[Phase] = frozenset({"rollout", "reward", "score", "sync"})
"""Phases that run once for each batch of completions, whatever is learnt from it."""


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """How often a cycle repeats what was traced."""

    micro_steps: int
    """Per rank."""

    optimizer_steps: int
    traced_micro_steps: int
    """Micro-steps of the optimizer step whose work was counted."""

    scored: float
    """How often a cycle repeats the scoring that was counted."""


def predicted(
    prediction: Prediction,
    trace: Trace,
    composition: Composition,
    *,
    gpu: Gpu | None,
    config: Mapping[str, object],
    iterations: int = 1,
    num_generations: int = 1,
) -> Prediction:
    """The prediction with its phases' seconds and its tokens per second; as it was on a CPU, and on a GPU without known speed."""
    device = None if gpu is None else ceilings(gpu)
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
    """Seconds of one generation cycle by phase. `reward` and `load` are nobody's to predict, and are left out."""
    counts = counted(trace, composition, iterations=iterations)
    seconds: dict[Phase, Estimate] = {}
    for work in trace.work:
        if work.phase not in ("load", "reward"):
            seconds[work.phase] = phase_seconds(work, device).scaled(_repeats(work.phase, counts))
    seconds = _with_exchanges(seconds, trace.inventory, composition, counts, device)
    if composition.generation != "none":
        writing = _writing(composition, config, engine, num_generations)
        written, layers = decoding.seconds(writing, device), len(shapes.shape(config).layers)
        rollout = with_gathering(written, trace.inventory, composition, writing, layers, device)
        if rollout is not None:
            seconds["rollout"] = rollout
    if composition.generation in ("engine", "server"):
        seconds["sync"] = _sync(trace.inventory, composition, config, device)
    return {phase: seconds[phase] for phase in PHASES if phase in seconds}


def phase_seconds(work: Work, device: Ceilings) -> Estimate:
    """One phase as it was traced: arithmetic and memory one after the other, or the host that launches both."""
    busy = computing(work.flops, device) + moving(work.moved_bytes, device)
    return longer(busy, each(work.kernels, efficiency("launch_microseconds"), MICRO))


def tokens_per_second(seconds: Mapping[Phase, Estimate], composition: Composition) -> Estimate | None:
    """Completion tokens that enter the loss, over all ranks, for each second of a whole cycle; None where none are written."""
    tokens = composition.generation_batch * composition.completion_length
    if "rollout" not in seconds:
        return None
    total = Estimate.exactly(0)
    for spent in seconds.values():
        total = total + spent
    if not tokens or total.low <= 0:
        return None
    return Estimate(value=tokens / total.value, low=tokens / total.high, high=tokens / total.low)


def counted(trace: Trace, composition: Composition, *, iterations: int = 1) -> Cycle:
    """How often the cycle repeats the traced step. Without completions of its own, a cycle is one optimizer step."""
    micro_steps = composition.accumulation
    if composition.generation != "none":
        micro_steps = iterations * max(1, composition.generation_batch // (composition.ranks * composition.micro_batch))
    traced = traced_micro_steps(trace)
    whole_batches = traced_batches(trace) if trace.basis == "traced" and composition.generation != "none" else 0
    return Cycle(
        micro_steps=micro_steps,
        optimizer_steps=max(1, micro_steps // composition.accumulation),
        traced_micro_steps=traced,
        scored=1 / whole_batches if whole_batches else micro_steps / traced / iterations,
    )


def traced_micro_steps(trace: Trace) -> int:
    """Backward passes in the last step that was traced."""
    phases = trace.last_step
    return max(1, sum(1 for before, now in zip(["load", *phases], phases, strict=False) if now == "backward" != before))


def traced_batches(trace: Trace) -> int:
    """Batches of completions that were scored in the last step that was traced: stretches of what makes one."""
    making = [phase in MAKING_A_BATCH for phase in trace.last_step]
    return sum(1 for before, now in zip([False, *making], making, strict=False) if now and not before)


def _repeats(phase: Phase, counts: Cycle) -> float:
    if phase == "optimizer":
        return counts.optimizer_steps
    return counts.scored if phase in MAKING_A_BATCH else counts.micro_steps / counts.traced_micro_steps


def _with_exchanges(
    seconds: dict[Phase, Estimate], inventory: Inventory, composition: Composition, counts: Cycle, device: Ceilings
) -> dict[Phase, Estimate]:
    """Exchanges hide behind the backward pass: between nothing of them and all of them shows."""
    sent = exchanged_bytes(inventory, composition, counts)
    spent = crossing(sent, device) if sent else None
    if spent is None or "backward" not in seconds:
        return seconds
    cover = seconds["backward"]
    low = max(0.0, spent.low - cover.high)
    value = max(low, spent.value - cover.value, 0.2 * spent.value)
    return {**seconds, "backward": cover + Estimate(value=value, low=low, high=max(value, spent.high))}


def exchanged_bytes(inventory: Inventory, composition: Composition, counts: Cycle) -> float:
    """Bytes that one rank sends in a cycle, by how the training state is spread."""
    ranks = composition.ranks
    ring = (ranks - 1) / ranks
    weights, gradients = inventory.weight_bytes * ring, inventory.trainable_bytes * ring
    every, kind = counts.micro_steps, composition.sharded_by
    if ranks == 1:
        return 0.0
    if kind in ("fsdp1", "fsdp2", "zero3"):
        return every * (2 * weights + gradients)  # gathered forward and backward; gradients scattered
    if kind == "zero2":
        return every * gradients + counts.optimizer_steps * gradients
    return counts.optimizer_steps * 2 * gradients


def _writing(composition: Composition, config: Mapping[str, object], engine: EngineFit | None, num_generations: int) -> Writing:
    settings = composition.engine
    by_engine = composition.generation in ("engine", "server")
    tensor_parallel = settings.tensor_parallel if settings is not None else 1
    sequences = max(1, composition.generation_batch * tensor_parallel // composition.ranks)
    at_a_time = min(sequences, composition.writes_at_a_time or sequences if settings is None else settings.max_num_seqs)
    if engine is not None:
        at_a_time = max(1, min(at_a_time, int(engine.concurrency)))
    return Writing(
        config=config,
        dtype=composition["policy"].dtype,
        sequences=sequences,
        prompts=max(1, sequences // num_generations),
        prompt_length=composition.prompt_length,
        completion_length=composition.completion_length,
        at_a_time=at_a_time,
        by_engine=by_engine,
        tensor_parallel=tensor_parallel,
        quantised_bits=settings.quantised_bits if settings is not None else None,
    )


def _sync(inventory: Inventory, composition: Composition, config: Mapping[str, object], device: Ceilings) -> Estimate:
    """Every weight is read and written, three times where an adapter is merged and taken out again; and the host names each."""
    merged = composition["policy"].adapter_rank is not None
    copies = moving((6.0 if merged else 2.0) * inventory.weight_bytes, device)
    shape = shapes.shape(config)
    names = len(shape.layers) * _names_per_layer(shape) + 3
    return copies + each(names, efficiency("push_milliseconds_per_parameter"), MILLI)


def _names_per_layer(shape: shapes.Shape) -> int:
    """Matrices and norms of a layer; biases and experts come as they are counted by the model: this is a lower middle."""
    return 9 if not any(layer.experts for layer, _ in shape.kinds) else 12

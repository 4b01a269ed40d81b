"""Generation and training on separate GPUs: who waits for whom.

g: seconds in which the engines generate one batch alone, its last completion included; r: seconds per
batch if they never run empty; t: seconds of training on it in m optimizer steps. Training waits

- by turns:                      g
- one batch ahead:               max(0, g - t)
- stream, nothing ahead:         max(g + t/m, t + g/m) - t, at most g, at least max(0, g - t)
- stream, completions ahead:     max(0, r - t), with g in place of r if completions end before a sync

Weights are sent while both wait. Interrupted completions may be computed again, which adds to r.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from autotune.core.composition import Composition, SplitEngines
from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate, PipelineTimes
from autotune.estimate.throughput import generation
from autotune.estimate.throughput.generation import GenerationLoad
from autotune.estimate.throughput.roofline import Ceilings

Generating = Callable[[GenerationLoad], Estimate]  # seconds in which one engine generates its completions
FEWER, MORE = 1, 3  # multiples of a load whose difference is free of the first and the last completions


def limited(composition: Composition) -> SplitEngines | None:
    """Return the engines, each with no more sequences than are in flight or may be ahead."""
    split = composition.split
    if split is None:
        return None
    ahead = 1 + split.batches_ahead if split.overlap == "stream" else 1
    completions = math.ceil(composition.generation_batch * ahead)
    each = -(-min(completions, split.in_flight or completions) // split.engines)
    engine = replace(split.engine, max_num_seqs=max(1, min(each, split.engine.max_num_seqs)))
    return replace(split, engine=engine)


def engine_load(load: GenerationLoad, split: SplitEngines, batch: int, concurrency: float | None) -> GenerationLoad:
    """Return one engine's part of a batch of completions.

    batch: completions over all engines; concurrency: sequences that fit into an engine's cache.
    """
    sequences = max(1, -(-batch // split.engines))
    return replace(
        load,
        dtype=split.dtype,
        sequences=sequences,
        prompts=max(1, load.prompts * sequences // load.sequences),
        batch=min(split.engine.max_num_seqs, max(1, int(concurrency or split.engine.max_num_seqs))),
        by_engine=True,
        tensor_parallel=split.engine.tensor_parallel,
        quantised_bits=split.engine.quantised_bits,
    )


def overlapped(
    seconds: Mapping[Phase, Estimate],
    split: SplitEngines,
    load: GenerationLoad,
    generating: Generating,
    device: Ceilings,
    *,
    optimizer_steps: int,
) -> tuple[dict[Phase, Estimate], PipelineTimes]:
    """Return the phases as training sees them, the rollout being its wait, and both sides' times."""
    training = sum((spent for phase, spent in seconds.items() if phase != "sync"), start=Estimate.exactly(0))
    generated = _batch_seconds(split, load, generating, device)
    wait = _wait(split, generated, training, optimizer_steps)
    sync = seconds.get("sync", Estimate.exactly(0))
    return {**seconds, "rollout": wait}, PipelineTimes(generation=generated, training=training + sync)


def _batch_seconds(split: SplitEngines, load: GenerationLoad, generating: Generating, device: Ceilings) -> Estimate:
    """Return g, or r with what interruptions cost."""
    if split.overlap != "stream" or not split.batches_ahead or split.at_sync == "drain":
        return generating(load)
    # Loads of which even the smaller fills the engine.
    whole = max(load.sequences, split.engine.max_num_seqs)
    fewer, more = (
        generating(replace(load, sequences=part * whole, prompts=max(1, part * whole * load.prompts // load.sequences)))
        for part in (FEWER, MORE)
    )
    share = load.sequences / whole / (MORE - FEWER)
    steady = Estimate(value=more.value - fewer.value, low=more.low - fewer.low, high=more.high - fewer.high).scaled(share)
    if split.at_sync == "pause":
        return steady
    halfway = replace(
        load, sequences=load.together, prompts=load.together, prompt_length=load.prompt_length + load.completion_length // 2
    )
    return steady + generation.prefill(halfway, device)


def _wait(split: SplitEngines, generated: Estimate, training: Estimate, optimizer_steps: int) -> Estimate:
    if split.overlap == "none":
        return generated
    rest = Estimate(
        value=max(0.0, generated.value - training.value),
        low=max(0.0, generated.low - training.low),
        high=max(0.0, generated.high - training.high),
    )
    if split.overlap == "batch" or split.batches_ahead:
        return _ordered(rest)
    first = 1 / max(1, optimizer_steps)
    value = max(generated.value - (1 - first) * training.value, first * generated.value)
    return Estimate(value=value, low=min(value, rest.low), high=max(value, generated.high))


def _ordered(one: Estimate) -> Estimate:
    """Return the interval with its bounds on both sides of the value."""
    return Estimate(value=one.value, low=min(one.low, one.value), high=max(one.high, one.value))

"""Speed: seconds of each phase of a generation cycle, and tokens per second.

Work on a GPU is bound by arithmetic and memory, or by the host that launches it. Exchanges between
ranks are in `exchanges.py`. A search corrects the figures with measured values (`autotune.search`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from autotune.catalog import Gpu
from autotune.catalog.constants import efficiency
from autotune.core.composition import Composition
from autotune.core.dataset import TokenLengths
from autotune.core.measurement import PHASES, Phase
from autotune.core.prediction import EngineFit, Estimate, PipelineTimes, Prediction, highest
from autotune.core.trace import Inventory, Trace, Work
from autotune.estimate import model_shape
from autotune.estimate.throughput import drawn_lengths, exchanges, generation, roofline, split_engines
from autotune.estimate.throughput.cycle_time import BATCH_PHASES, counted
from autotune.estimate.throughput.generation import GenerationLoad
from autotune.estimate.throughput.roofline import MICRO, MILLI, Ceilings, independent


def with_throughput(
    prediction: Prediction,
    trace: Trace,
    composition: Composition,
    *,
    gpu: Gpu | None,
    config: Mapping[str, object],
    iterations: int = 1,
    num_generations: int = 1,
    lengths: TokenLengths | None = None,
) -> Prediction:
    """Add seconds by phase and tokens per second, at the longest completions and at `lengths`;
    unchanged for a CPU or a GPU of unknown speed."""
    device = None if gpu is None else roofline.ceilings(gpu)
    if device is None:
        return prediction

    def at(lengths: TokenLengths | None) -> Cycle:
        return cycle(
            trace,
            composition if lengths is None else drawn_lengths.refilled(composition, lengths),
            device=device,
            config=config,
            engine=prediction.engine,
            iterations=iterations,
            num_generations=num_generations,
            lengths=lengths,
        )

    longest = at(None)
    seconds = longest.seconds
    phases = tuple(dataclasses.replace(phase, seconds=seconds.get(phase.name)) for phase in prediction.phases)
    found = dataclasses.replace(
        prediction, phases=phases, tokens_per_second=tokens_per_second(seconds, composition), pipeline=longest.pipeline
    )
    if lengths is None or composition.generation == "none":
        return found
    drawn, nothing = lengths.up_to(composition.completion_length), Estimate.exactly(0)
    cycles = [at(part) for part in drawn.parts]
    usual = {
        phase: sum((one.seconds[phase] for one in cycles), start=nothing).scaled(1 / len(cycles)) for phase in cycles[0].seconds
    }
    mean = fmean(part.mean for part in drawn.parts)
    return dataclasses.replace(
        found,
        tokens_per_second_at_lengths=tokens_per_second(usual, drawn_lengths.refilled(composition, drawn), mean),
        seconds_at_lengths=usual,
        pipeline=cycles[-1].pipeline,
    )


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """Seconds of one generation cycle by phase."""

    seconds: Mapping[Phase, Estimate]
    pipeline: PipelineTimes | None = None


def cycle(
    trace: Trace,
    composition: Composition,
    *,
    device: Ceilings,
    config: Mapping[str, object],
    engine: EngineFit | None = None,
    iterations: int = 1,
    num_generations: int = 1,
    lengths: TokenLengths | None = None,
) -> Cycle:
    """Return seconds of one generation cycle by phase. `reward` and `load` cannot be predicted.

    lengths: completions that occur; None: all are the longest.
    """
    # 1. Traced phases, repeated as often as a cycle does.
    counts = counted(trace, composition, iterations=iterations)
    if lengths is not None:
        trace, counts = drawn_lengths.shortened(trace, composition, counts, lengths)
    seconds: dict[Phase, Estimate] = {}
    repeats = dict.fromkeys(BATCH_PHASES, counts.scored) | {"optimizer": float(counts.optimizer_steps)}
    for work in trace.work:
        if work.phase not in ("load", "reward"):
            often = repeats.get(work.phase, counts.micro_steps / counts.traced_micro_steps)
            seconds[work.phase] = phase_seconds(work, device).scaled(often)
    if "optimizer" in seconds:
        own = roofline.overhead_seconds(counts.optimizer_steps, efficiency("trainer_step_milliseconds"), MILLI)
        seconds["optimizer"] = seconds["optimizer"] + own
    # 2. Exchanges between ranks, beside the backward pass.
    seconds = exchanges.with_exchanges(seconds, trace, composition, counts, device)
    # 3. Weight sync.
    if composition.generation in ("engine", "server"):
        seconds["sync"] = _sync(trace.inventory, composition, config, device)
    # 4. Generation, on the same devices or on others.
    if composition.generation == "none":
        return _ordered(seconds)
    load, split = _generation_load(composition, config, engine, num_generations), split_engines.limited(composition)

    def generating(load: GenerationLoad) -> Estimate:
        if lengths is None:
            return generation.seconds(load, device)
        return drawn_lengths.rollout_seconds(load, split.engine if split else composition.engine, engine, lengths, device)

    if split is not None:
        concurrency = None if engine is None else engine.concurrency
        load = split_engines.engine_load(load, split, composition.generation_batch, concurrency)
        steps = counts.optimizer_steps
        found, times = split_engines.overlapped(seconds, split, load, generating, device, optimizer_steps=steps)
        return _ordered(found, times)
    layers = len(model_shape.shape(config).layers)
    rollout = generation.with_gathering(generating(load), trace.inventory, composition, load, layers, device)
    return _ordered(seconds if rollout is None else {**seconds, "rollout": rollout})


def _ordered(seconds: Mapping[Phase, Estimate], times: PipelineTimes | None = None) -> Cycle:
    return Cycle(seconds={phase: seconds[phase] for phase in PHASES if phase in seconds}, pipeline=times)


def phase_seconds(work: Work, device: Ceilings) -> Estimate:
    """max(arithmetic + memory + gaps between kernels, launches by the host) of one traced phase."""
    busy = independent(
        roofline.compute_seconds(work.flops, device),
        roofline.memory_seconds(work.moved_bytes, device),
        roofline.overhead_seconds(work.kernels, efficiency("kernel_gap_microseconds"), MICRO),
    )
    return highest((busy, roofline.overhead_seconds(work.kernels, efficiency("launch_microseconds"), MICRO)))


def tokens_per_second(
    seconds: Mapping[Phase, Estimate], composition: Composition, completion: float | None = None
) -> Estimate | None:
    """Tokens in the loss of all ranks per second of a whole cycle; None if its rollout has no time.

    completion: mean length; None: the longest.
    """
    if composition.generation == "none":
        row = composition.loss_tokens or composition.prompt_length + composition.completion_length
        tokens: float = composition.ranks * composition.micro_batch * composition.accumulation * row
    elif "rollout" in seconds:
        tokens = composition.generation_batch * (completion or composition.completion_length)
    else:
        return None
    total = sum(seconds.values(), start=Estimate.exactly(0))
    if not tokens or total.low <= 0:
        return None
    return Estimate(value=tokens / total.value, low=tokens / total.high, high=tokens / total.low)


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
        dtype=composition["engine" if "engine" in composition else "policy"].dtype,
        sequences=sequences,
        prompts=max(1, sequences // num_generations),
        prompt_length=composition.prompt_length,
        completion_length=composition.completion_length,
        batch=batch,
        by_engine=composition.generation in ("engine", "server"),
        tensor_parallel=tensor_parallel,
        quantised_bits=settings.quantised_bits if settings is not None else None,
        of_batch=composition.generation_batch,
    )


ADAPTER_TENSORS = 14  # tensors of an adapter in one layer: two for each of its seven products


def _sync(inventory: Inventory, composition: Composition, config: Mapping[str, object], device: Ceilings) -> Estimate:
    """Read and write every weight (with adapters three times) + host time per parameter, or the adapter alone."""
    alone = composition.syncs_adapter_only
    merged, sent = composition["policy"].adapter_rank is not None, inventory.trainable_bytes if alone else inventory.weight_bytes
    copies = roofline.memory_seconds((6.0 if merged and not alone else 2.0) * sent, device)
    shape = model_shape.shape(config)
    # Matrices and norms of a layer; the model itself counts biases and experts: a low middle.
    names_per_layer = 12 if any(layer.experts for layer, _ in shape.kinds) else 9
    names = len(shape.layers) * (1 if alone else names_per_layer) + 3
    if composition.split is not None:  # over an unknown link they reach the engines' GPUs at once
        copies = copies + (roofline.link_seconds(sent, device) or Estimate.exactly(0))
    pushes = roofline.overhead_seconds(names, efficiency("push_milliseconds_per_parameter"), MILLI)
    if composition.sync_gathers == "packed":  # the engine's loader takes whole buffers
        buffers = math.ceil(sent / max(1, composition.sync_buffer_bytes))
        few = roofline.overhead_seconds(buffers, efficiency("push_milliseconds_per_parameter"), MILLI)
        pushes = dataclasses.replace(few, high=pushes.high)
    if alone:  # all at once, layer by layer or tensor by tensor: frameworks differ
        pushes = dataclasses.replace(pushes, low=0.0, high=pushes.high * ADAPTER_TENSORS)
    return copies + pushes

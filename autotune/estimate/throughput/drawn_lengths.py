"""Generation cycle over completions of the lengths that occur, in place of the longest.

The engine's time comes from a simulation of its scheduler. A trainer pads the completions of a rank to
the longest of them, or packs rows without padding.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from statistics import fmean

from autotune.core.composition import Composition, EngineSettings
from autotune.core.dataset import TokenLengths
from autotune.core.prediction import EngineFit, Estimate
from autotune.core.trace import Trace, Work
from autotune.estimate.throughput import generation
from autotune.estimate.throughput.cycle_time import CycleTime
from autotune.estimate.throughput.generation import GenerationLoad
from autotune.estimate.throughput.rollout_simulation import EngineLimits, Pass, Request, simulate
from autotune.estimate.throughput.roofline import ATTENTION, Ceilings
from autotune.estimate.vllm_blocks import BLOCK_TOKENS
from autotune.estimate.vllm_engine import TRL_BATCHED_TOKENS

SCALED_PHASES = frozenset({"score", "forward", "backward"})


def refilled(composition: Composition, lengths: TokenLengths) -> Composition:
    """Return the step with as many completions of these lengths as its full micro-batches hold, if they decide it.

    Their prompts are shared: n completions of length c make room for n c / mean."""
    if not composition.steps_by_rows:
        return composition
    more = composition.completion_length / lengths.mean
    each = max(1, round(composition.micro_batch * more))
    return dataclasses.replace(
        composition, micro_batch=each, generation_batch=each * composition.ranks * composition.accumulation
    )


def shortened(trace: Trace, composition: Composition, counts: CycleTime, lengths: TokenLengths) -> tuple[Trace, CycleTime]:
    """Return the trace with the training work of a micro-batch at these lengths, and the repetitions.

    r = (prompt + completion) / (prompt + longest completion); products and memory: r, attention: r² when
    rows are padded. Kernels launch as often. A token budget is filled with more rows instead: as much
    work per micro-batch, r times the micro-batches, at least one per optimizer step. A step of full
    micro-batches (`refilled`) keeps their number and their tokens, each of which sees fewer before it.
    """
    if composition.steps_by_rows:
        seen = fmean(length * length for length in lengths.sample) / (2 * lengths.mean)
        fewer_keys = (composition.prompt_length + seen) / (composition.prompt_length + composition.completion_length / 2)
        return dataclasses.replace(trace, work=tuple(_scaled(work, 1.0, fewer_keys) for work in trace.work)), counts
    rows = max(1, composition.generation_batch // composition.ranks)
    padded = lengths.mean if composition.packs_rows else lengths.expected_longest(rows)
    prompt = composition.prompt_length
    ratio = (prompt + padded) / max(1, prompt + composition.completion_length)
    squared = fmean(((prompt + length) / (prompt + composition.completion_length)) ** 2 for length in lengths.sample)
    attention = squared if composition.packs_rows else ratio * ratio
    fewer = 1.0
    if composition.token_budget:
        micro_steps = max(counts.optimizer_steps, round(counts.micro_steps * ratio))
        fewer = micro_steps / counts.micro_steps
        counts = dataclasses.replace(counts, micro_steps=micro_steps, scored=counts.scored * fewer)
    work = tuple(_scaled(work, ratio / fewer, attention / fewer) for work in trace.work)
    return dataclasses.replace(trace, work=work), counts


def _scaled(work: Work, ratio: float, attention: float) -> Work:
    if work.phase not in SCALED_PHASES:
        return work
    flops = {key: count * (attention if key.startswith(ATTENTION) else ratio) for key, count in work.flops.items()}
    return dataclasses.replace(work, flops=flops, moved_bytes=work.moved_bytes * ratio)


def rollout_seconds(
    load: GenerationLoad, settings: EngineSettings | None, engine: EngineFit | None, lengths: TokenLengths, device: Ceilings
) -> Estimate:
    """Return the time in which an engine, or the trainer's own model, generates a batch of these lengths."""
    if not load.by_engine:
        # The whole batch decodes until its longest completion ends.
        until = math.ceil(lengths.expected_longest(max(load.together, load.of_batch)))
        return generation.seconds(dataclasses.replace(load, completion_length=until), device)
    longest = load.prompt_length + load.completion_length
    limits = EngineLimits(
        max_num_seqs=load.sequences if settings is None else settings.max_num_seqs,
        max_batched_tokens=(settings and settings.max_num_batched_tokens) or TRL_BATCHED_TOKENS,
        block_tokens=BLOCK_TOKENS,
        blocks=None if engine is None else max(engine.kv_cache_tokens, longest) // BLOCK_TOKENS + 1,
    )
    seconds = _simulated(_ByContent(load), _ByContent(device), limits, lengths)
    # The bounds are those of the same passes at the mean length.
    level = generation.seconds(dataclasses.replace(load, completion_length=max(1, round(lengths.mean))), device)
    return Estimate(value=seconds, low=seconds * level.low / level.value, high=seconds * level.high / level.value)


class _ByContent:
    """Value that has no hash of its own, compared by its content."""

    def __init__(self, value: GenerationLoad | Ceilings) -> None:
        self.value, self._text = value, repr(value)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByContent) and self._text == other._text


@lru_cache(maxsize=4096)
def _simulated(load_of: _ByContent, device_of: _ByContent, limits: EngineLimits, lengths: TokenLengths) -> float:
    load, device = load_of.value, device_of.value
    assert isinstance(load, GenerationLoad) and isinstance(device, Ceilings)

    def cost(one: Pass) -> float:
        length = one.context / max(1, one.decoding)
        return generation.one_pass(load, device, together=one.decoding, length=length, prefilled=one.prefilled).value

    each = max(1, load.sequences // load.prompts)
    drawn = lengths.draw(load.sequences)
    # The slowest engine has the longest completion of them all.
    drawn[drawn.index(max(drawn))] = round(lengths.expected_longest(max(load.sequences, load.of_batch)))
    requests = [Request(prompt=load.prompt_length, completion=length, group=place // each) for place, length in enumerate(drawn)]
    return simulate(requests, limits, cost).seconds

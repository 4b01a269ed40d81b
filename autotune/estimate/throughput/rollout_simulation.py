"""Rollout of a batch of completions: on the GPUs that train or on others, at the longest
completions or at those that occur.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.catalog import Gpu
from autotune.core.composition import Composition, EngineSettings, SplitEngines
from autotune.core.dataset import TokenLengths
from autotune.core.measurement import Phase
from autotune.core.prediction import EngineFit, Estimate, PipelineTimes
from autotune.estimate.engine_cache import BLOCK_TOKENS
from autotune.estimate.rollout_engine import TRL_BATCHED_TOKENS
from autotune.estimate.throughput import generation
from autotune.estimate.throughput.generation import GenerationLoad

MAX_SIMULATED = 4096  # results kept

_simulated: dict[tuple[object, ...], float] = {}


def rollout_seconds(
    load: GenerationLoad,
    settings: EngineSettings | None,
    engine: EngineFit | None,
    lengths: TokenLengths | None,
    gpu: Gpu,
) -> Estimate:
    """Return the time in which an engine, or the trainer's own model, generates a batch of these
    lengths; None: the longest.
    """
    if lengths is None:
        return generation.seconds(load, gpu)
    if not load.by_engine:
        # The whole batch decodes until its longest completion ends.
        until = math.ceil(lengths.expected_longest(max(load.together, load.of_batch)))
        return generation.seconds(replace(load, completion_length=until), gpu)
    seconds = _cached_seconds(load, gpu, _limits(load, settings, engine), lengths)
    # The bounds are those of the same passes at the mean length.
    level = generation.seconds(replace(load, completion_length=max(1, round(lengths.mean))), gpu)
    return Estimate(
        value=seconds,
        low=seconds * level.low / level.value,
        high=seconds * level.high / level.value,
    )


def _limits(
    load: GenerationLoad,
    settings: EngineSettings | None,
    engine: EngineFit | None,
) -> EngineLimits:
    limits = EngineLimits(max_num_seqs=load.sequences, max_batched_tokens=TRL_BATCHED_TOKENS)
    if settings is not None:
        tokens = settings.max_num_batched_tokens or TRL_BATCHED_TOKENS
        limits = EngineLimits(max_num_seqs=settings.max_num_seqs, max_batched_tokens=tokens)
    if engine is None:
        return limits
    longest = load.prompt_length + load.completion_length
    return replace(limits, blocks=max(engine.kv_cache_tokens, longest) // BLOCK_TOKENS + 1)


def _cached_seconds(
    load: GenerationLoad,
    gpu: Gpu,
    limits: EngineLimits,
    lengths: TokenLengths,
) -> float:
    key = (repr(load), repr(gpu), limits, lengths)  # a load and a GPU have no hash
    if key not in _simulated:
        if len(_simulated) >= MAX_SIMULATED:
            _simulated.clear()
        _simulated[key] = _simulated_seconds(load, gpu, limits, lengths)
    return _simulated[key]


def _simulated_seconds(
    load: GenerationLoad,
    gpu: Gpu,
    limits: EngineLimits,
    lengths: TokenLengths,
) -> float:
    def cost(engine_pass: Pass) -> float:
        length = engine_pass.context / max(1, engine_pass.decoding)
        return generation.one_pass(
            load,
            gpu,
            together=engine_pass.decoding,
            length=length,
            prefilled=engine_pass.prefilled,
        ).value

    drawn = lengths.draw(load.sequences)
    # The slowest engine has the longest completion of them all.
    longest = round(lengths.expected_longest(max(load.sequences, load.of_batch)))
    drawn[drawn.index(max(drawn))] = longest

    group_size = max(1, load.sequences // load.prompts)
    requests = []
    for place, length in enumerate(drawn):
        request = Request(
            prompt=load.prompt_length,
            completion=length,
            group=place // group_size,
        )
        requests.append(request)
    return simulate(requests, limits, cost).seconds


# Generation and training on separate GPUs: who waits for whom.
#
# g: seconds in which the engines generate one batch alone, its last completion included; r: seconds
# per batch if they never run empty; t: seconds of training on it in m optimizer steps. Training
# waits
#
# - by turns:                      g
# - one batch ahead:               max(0, g - t)
# - stream, nothing ahead:         max(g + t/m, t + g/m) - t, at most g, at least max(0, g - t)
# - stream, completions ahead:     max(0, r - t), g in place of r if completions end before a sync
#
# Weights are sent while both wait. Interrupted completions may be computed again, which adds to r.

# Multiples of a load whose difference is free of the first and the last completions
FEWER, MORE = 1, 3
LEAST_OF_MEAN = 0.5  # smaller differences, in seconds at the mean length, are the last completion's


def split_engines(composition: Composition) -> SplitEngines | None:
    """Return the engines, each with no more sequences than are in flight or may be ahead."""
    split = composition.split
    if split is None:
        return None
    ahead = 1 + split.batches_ahead if split.overlap == "stream" else 1
    completions = math.ceil(composition.generation_batch * ahead)
    in_flight = min(completions, split.in_flight or completions)
    sequences = min(-(-in_flight // split.engines), split.engine.max_num_seqs)
    engine = replace(split.engine, max_num_seqs=max(1, sequences))
    return replace(split, engine=engine)


def overlapped(
    seconds: Mapping[Phase, Estimate],
    split: SplitEngines,
    load: GenerationLoad,
    engine: EngineFit | None,
    lengths: TokenLengths | None,
    gpu: Gpu,
    *,
    optimizer_steps: int,
) -> tuple[dict[Phase, Estimate], PipelineTimes]:
    """Return the phases as training sees them, the rollout being its wait, and both sides'
    times.
    """

    # 1. g, or r with what interruptions cost.
    def generation_of(some: GenerationLoad) -> Estimate:
        return rollout_seconds(some, split.engine, engine, lengths, gpu)

    if split.overlap != "stream" or not split.batches_ahead or split.at_sync == "drain":
        generated = generation_of(load)
    else:
        generated = _without_end(load, split, lengths, gpu, generation_of)
        if split.at_sync != "pause":
            generated = generated + _computed_again(load, gpu)

    # 2. The wait.
    training = Estimate.exactly(0)
    for phase, spent in seconds.items():
        if phase != "sync":
            training = training + spent
    wait = _wait(split, generated, training, optimizer_steps)
    sync = seconds.get("sync", Estimate.exactly(0))
    times = PipelineTimes(generation=generated, training=training + sync)
    return {**seconds, "rollout": wait}, times


def _without_end(
    load: GenerationLoad,
    split: SplitEngines,
    lengths: TokenLengths | None,
    gpu: Gpu,
    generation_of: Callable[[GenerationLoad], Estimate],
) -> Estimate:
    """Return r: the difference of two loads of which even the smaller fills the engine.

    Where one completion outlasts all others, both loads end with it, and their difference says
    nothing: r is then that of completions of the mean length.
    """
    sequences = max(load.sequences, split.engine.max_num_seqs)
    few = generation_of(_multiple(load, FEWER * sequences))
    many = generation_of(_multiple(load, MORE * sequences))
    share = load.sequences / sequences / (MORE - FEWER)
    value = many.value - few.value
    if lengths is not None:
        mean = max(1, round(lengths.mean))
        at_mean = generation.seconds(replace(load, completion_length=mean), gpu)
        if value * share < LEAST_OF_MEAN * at_mean.value:
            return at_mean
    difference = Estimate(
        value=value,
        low=max(0.0, min(value, many.low - few.low)),
        high=max(value, many.high - few.high),
    )
    return difference.scaled(share)


def _multiple(load: GenerationLoad, sequences: int) -> GenerationLoad:
    prompts = max(1, sequences * load.prompts // load.sequences)
    return replace(load, sequences=sequences, prompts=prompts)


def _computed_again(load: GenerationLoad, gpu: Gpu) -> Estimate:
    """Return the time of reading the running sequences again, halfway through their completion."""
    interrupted = replace(
        load,
        sequences=load.together,
        prompts=load.together,
        prompt_length=load.prompt_length + load.completion_length // 2,
    )
    return generation.prefill(interrupted, gpu)


def _wait(
    split: SplitEngines,
    generated: Estimate,
    training: Estimate,
    optimizer_steps: int,
) -> Estimate:
    if split.overlap == "none":
        return generated
    low = max(0.0, generated.low - training.low)
    if split.overlap == "batch" or split.batches_ahead:
        value = max(0.0, generated.value - training.value)
        return Estimate(
            value=value,
            low=min(value, low),
            high=max(value, generated.high - training.high),
        )
    first = 1 / max(1, optimizer_steps)
    streamed = max(generated.value - (1 - first) * training.value, first * generated.value)
    return Estimate(
        value=streamed,
        low=min(streamed, low),
        high=max(streamed, generated.high),
    )


# Simulation of a continuous-batching engine.
#
# It has the rules of vLLM's scheduler: running sequences first, then waiting ones while sequences,
# tokens of a pass and cache blocks allow. Without a free block the sequence that was admitted last
# is preempted; it is computed again later. Full blocks of a prompt are shared within its group.
# Passes between two events are computed at once.


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of the scheduler on one engine."""

    max_num_seqs: int
    max_batched_tokens: int  # tokens of one pass
    block_tokens: int = BLOCK_TOKENS
    blocks: int | None = None  # of the KV cache; None: more than the sequences need


@dataclass(kw_only=True, slots=True)
class Request:
    """Completion to generate, and its state in the engine."""

    prompt: int  # tokens
    completion: int  # tokens, at least 1
    group: int  # requests of one group have the same prompt
    generated: int = 0
    cached: int = 0  # tokens in the KV cache
    shared: int = 0  # blocks that belong to the group's prompt

    @property
    def length(self) -> int:
        return self.prompt + self.generated

    @property
    def decodes(self) -> bool:
        return self.generated > 0 and self.cached == self.length - 1


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Forward pass of the engine."""

    decoding: int  # sequences that get their next token
    context: float  # cached tokens that these sequences read, in total
    prefilled: int  # prompt tokens
    repeats: int = 1  # equal passes that this one stands for, at their mean context


def simulate(
    requests: Sequence[Request],
    limits: EngineLimits,
    cost: Callable[[Pass], float],
) -> Rollout:
    """Return the rollout until the last completion ends. `cost`: seconds of one pass."""
    rollout = Rollout(requests, limits, cost)
    while rollout.waiting or rollout.running:
        rollout.advance()
    return rollout


class Rollout:
    """State of the scheduler, and the sums so far."""

    def __init__(
        self,
        requests: Sequence[Request],
        limits: EngineLimits,
        cost: Callable[[Pass], float],
    ) -> None:
        self.limits = limits
        self.cost = cost
        self.waiting = deque(replace(request) for request in requests)
        self.running: list[Request] = []
        self.groups: dict[int, int] = {}  # group -> running sequences that hold its prompt's blocks
        self.used = 0
        self.seconds = 0.0
        self.passes = 0
        self.preemptions = 0

    def advance(self) -> None:
        """Run one pass, or as many equal ones as fit before the next event."""
        scheduled = self._schedule()
        if not scheduled:
            raise ValueError("The KV cache is too small for one sequence.")
        decoding = [sequence for sequence, _ in scheduled if sequence.decodes]
        prefilled = sum(new for sequence, new in scheduled if not sequence.decodes)
        admits = self.waiting and self._has_place() and self._free() > 0
        repeats = 1
        if not prefilled and not admits:
            repeats = self._equal_passes(decoding)
        self._count(decoding, prefilled, repeats)
        self._add_tokens(scheduled, repeats)
        self._end_complete()

    def _schedule(self) -> list[tuple[Request, int]]:
        """Return the sequences of the next pass, each with its new tokens."""
        # 1. Running sequences: decode, or continue their prompts.
        budget = self.limits.max_batched_tokens
        preemptions = self.preemptions
        scheduled: list[tuple[Request, int]] = []
        position = 0
        while position < len(self.running):  # each took a token of the pass that admitted it
            sequence = self.running[position]
            new = min(budget, sequence.length - sequence.cached)
            if not self._allocate(sequence, new):
                continue  # it was preempted itself, or is tried again after a preemption
            scheduled.append((sequence, new))
            budget -= new
            position += 1

        # 2. Waiting sequences, without a preemption.
        if self.preemptions > preemptions:
            return scheduled
        while self.waiting and budget > 0 and self._has_place():
            sequence = self.waiting[0]
            admitted = self._admit(sequence, budget)
            if admitted is None:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            scheduled.append((sequence, admitted))
            budget -= admitted
        return scheduled

    def _has_place(self) -> bool:
        return len(self.running) < self.limits.max_num_seqs

    def _count(
        self,
        decoding: Sequence[Request],
        prefilled: int,
        repeats: int,
    ) -> None:
        """Add equal passes to the sums."""
        context = sum(sequence.cached for sequence in decoding)
        engine_pass = Pass(
            decoding=len(decoding),
            context=context + len(decoding) * (repeats - 1) / 2,
            prefilled=prefilled,
            repeats=repeats,
        )
        self.seconds += repeats * self.cost(engine_pass)
        self.passes += repeats

    def _add_tokens(self, scheduled: Sequence[tuple[Request, int]], repeats: int) -> None:
        for sequence, new in scheduled:
            sequence.cached += new
            if sequence.cached == sequence.length:
                cached = sequence.cached + repeats - 1
                self.used += self._blocks(cached) - self._blocks(sequence.cached)
                sequence.cached = cached
                sequence.generated += repeats

    def _end_complete(self) -> None:
        running = []
        for sequence in self.running:
            if sequence.generated < sequence.completion:
                running.append(sequence)
            else:
                self._release(sequence)
        self.running = running

    def _equal_passes(self, decoding: Sequence[Request]) -> int:
        """Return the passes until a sequence ends or a block may be missing."""
        until_end = min(sequence.completion - sequence.generated for sequence in decoding)
        if self.limits.blocks is None:
            return until_end
        until_full = self._free() // len(decoding) * self.limits.block_tokens
        return max(1, min(until_end, until_full))

    # Blocks.

    def _free(self) -> int:
        return 1 << 60 if self.limits.blocks is None else self.limits.blocks - self.used

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)

    def _allocate(self, sequence: Request, new: int) -> bool:
        """Take blocks for new tokens; without enough, preempt the last sequence and return
        False.
        """
        needed = self._blocks(sequence.cached + new) - self._blocks(sequence.cached)
        if needed <= self._free():
            self.used += needed
            return True
        if len(self.running) == 1:
            raise ValueError("The KV cache is too small for one sequence.")
        victim = self.running.pop()
        self._release(victim)
        victim.cached = 0
        self.waiting.appendleft(victim)
        self.preemptions += 1
        return False

    def _admit(self, sequence: Request, budget: int) -> int | None:
        """Take blocks for a waiting sequence, those of its group's prompt apart; None: too few
        are free.
        """
        full = (sequence.prompt - 1) // self.limits.block_tokens
        shared = full if self.groups.get(sequence.group, 0) else 0
        cached = shared * self.limits.block_tokens
        new = min(budget, sequence.length - cached)
        needed = self._blocks(cached + new) - shared
        if needed > self._free():
            return None
        self.used += needed
        self.groups[sequence.group] = self.groups.get(sequence.group, 0) + 1
        sequence.cached = cached
        sequence.shared = full
        return new

    def _release(self, sequence: Request) -> None:
        self.groups[sequence.group] -= 1
        blocks = self._blocks(sequence.cached)
        if self.groups[sequence.group]:
            blocks -= min(sequence.shared, blocks)
        self.used -= blocks

"""Rollout in the trainer's own allocator: prompts in one pass, then a cache that grows token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from autotune.core.composition import Composition
from autotune.core.trace import Inventory, Part, Trace
from autotune.estimate import model_shape
from autotune.estimate.insertion import Insertion
from autotune.estimate.sharding import Sharding, gather_for_generation_bytes
from autotune.estimate.transformers_generation import (
    SCORE_BYTES,
    PrefillSizes,
    cache_bytes,
    prefill_events,
    prefill_sizes,
    sizes_of,
    transformers_generation,
)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Rollout in the trainer's allocator. Sizes: at the longest length, over all layers."""

    kv_cache_bytes: int
    logits_bytes: int  # of one token of each row, in the model's dtype
    scores_bytes: int  # the same in float32; its probabilities are as large
    prefill: PrefillSizes  # of one layer at a time, while the prompts' cache is made
    decode_bytes: int  # activations beside the cache and the logits
    layers: int
    prompt_length: int
    completion_length: int
    gathered: tuple[int, ...] = ()  # weights of all ranks, held here meanwhile beside this rank's part
    gathers_like_step: bool = False  # each of its passes gathers weights as the step's forward pass does


@dataclass(frozen=True, kw_only=True)
class PassGathering:
    """What a forward pass gathers, layer by layer; events as in an insertion."""

    sizes: tuple[int, ...]
    streams: tuple[int, ...]
    order: tuple[int, ...]
    turn: int  # events before a layer computes, all that it needs gathered
    kept: tuple[int, ...]  # what is there until the end: frees of it


GROWTH_LENGTHS = 64  # lengths at which a growing cache is replayed: steps of a few percent at most
LAYER_PIECES = 4  # large parameters of a decoder layer
PIECES = 8  # allocations that stand for a sum whose parts are unknown


def rollout(
    generation: Generation, event: int, step: int, workspace_bytes: int, gathering: PassGathering | None = None
) -> Insertion:
    """Return a rollout: prompts in one pass, then a cache that grows by `cat` per token.

    Keys or values of one layer at length l: kv_cache · l / (prompt + completion) / (2 · layers).
    The copies of one layer replace each other exactly as they do from token to token.
    """
    tensors = 2 * max(1, generation.layers)
    more = generation.completion_length - 1  # the last token is not cached
    lengths = min(GROWTH_LENGTHS, max(1, more))
    longest = generation.prompt_length + more
    cached = [
        int(generation.kv_cache_bytes * (generation.prompt_length + at / lengths * more) / longest) // tensors
        for at in range(lengths + 1)
    ]
    sampled = (generation.logits_bytes, generation.scores_bytes, generation.scores_bytes)
    prefill = sizes_of(generation.prefill, cached[0], workspace_bytes)
    # Sizes in the order of `_growth_events`.
    gathered = generation.gathered if gathering is None else gathering.sizes
    sizes = [*gathered, *(prefill[name] for name in prefill_events(tensors // 2, frozenset(prefill)).names), *sampled]
    for length in cached[1:]:
        sizes += [*[length] * tensors, generation.decode_bytes, *sampled]
    whole = tuple(range(1, len(gathered) + 1)), len(gathered), tuple(-one for one in range(1, len(gathered) + 1))
    walk = whole if gathering is None else (gathering.order, gathering.turn, gathering.kept)
    parts, order = _growth_events(tensors, lengths, len(gathered), walk, frozenset(prefill))
    streams = {} if gathering is None else dict(enumerate(gathering.streams))
    return Insertion(event=event, sizes=tuple(sizes), parts=parts, order=order, phase="rollout", step=step, streams=streams)


@cache
def _growth_events(
    tensors: int, lengths: int, gathered: int, walk: tuple[tuple[int, ...], int, tuple[int, ...]], prefill: frozenset[str]
) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """Return a rollout's parts and events; thousands of them, the same for all sizes."""
    parts: list[Part] = []
    order: list[int] = []

    def make(part: Part) -> int:
        parts.append(part)
        order.append(len(parts))
        return len(parts)

    def sample(last: Sequence[int]) -> list[int]:
        """Sample one token: scores and probabilities, each of which replaces that of the last token."""
        logits = make("logits")
        new: list[int] = []
        for at in range(2):
            new.append(make("logits"))
            order.extend(-old for old in last[at : at + 1])
        order.append(-logits)
        return new

    gathering, turn, kept = walk
    parts.extend(["communication"] * gathered)
    order.extend(gathering[:turn])
    prompts, first = prefill_events(tensors // 2, prefill), len(parts)
    parts.extend(prompts.parts)
    order.extend(entry + first if entry > 0 else entry - first for entry in prompts.order)
    held = [one + first for one in prompts.cache]
    order.extend(gathering[turn:])
    scores = sample(())
    for _ in range(lengths):
        for at, old in enumerate(held):
            held[at] = make("kv_cache")
            order.append(-old)
        order.append(-make("activations"))
        scores = sample(scores)
    order.extend((*(-one for one in (*held, *scores)), *kept))
    return tuple(parts), tuple(order)


def trainer_rollout(composition: Composition, config: Mapping[str, object], trace: Trace) -> Generation:
    """Return one rank's rollout: its part of the batch, at once or in smaller batches."""
    dtype = composition["policy"].dtype
    batch = composition.generation_micro_batch or max(1, composition.generation_batch // composition.ranks)
    prompt, completion = composition.prompt_length, composition.completion_length
    parts = transformers_generation(config, dtype=dtype, batch=batch, prompt=prompt, completion=completion)
    shape, element = model_shape.shape(config), model_shape.dtype_bytes(dtype)
    whole = cache_bytes(shape, element, batch, prompt + completion - 1)
    at_prefill = parts["kv_cache"] < whole
    # Weights of other ranks: all at once, or the running layer and the next.
    at_once = not composition.gathers_per_token and composition.sharded_by == "zero3"
    size = gathered_bytes(composition, trace.inventory, whole=at_once)
    if size and not at_once:
        size = max(size, 2 * max(trace.inventory.layer_bytes, default=0))
    pieces = tuple(size // PIECES + (piece < size % PIECES) for piece in range(PIECES)) if size else ()
    return Generation(
        kv_cache_bytes=whole,
        logits_bytes=batch * shape.vocabulary * element,
        scores_bytes=batch * shape.vocabulary * SCORE_BYTES,
        prefill=prefill_sizes(shape, dtype=dtype, batch=batch, prompt=prompt),
        decode_bytes=0 if at_prefill else parts["activations"],
        layers=len(shape.layers),
        prompt_length=prompt,
        completion_length=completion,
        gathered=gathered_pieces(size, trace) if at_once else pieces,
        gathers_like_step=bool(size) and not at_once,
    )


def gathered_pieces(size: int, trace: Trace) -> tuple[int, ...]:
    """Divide gathered weights by parameter: each has a block of its own.

    Without a trace of the parameters: a few for each layer, and the largest ones outside.
    """
    inventory = trace.inventory
    if not size:
        return ()
    if trace.usage is not None:
        return tuple(parameter.size for parameter in trace.usage.parameters)
    layers = [one for layer in inventory.layer_bytes for one in [layer // LAYER_PIECES] * LAYER_PIECES]
    outside = max(0, size - sum(layers))
    # By the mean size of a parameter, which adapters of another precision raise a little.
    largest = max(1, min(outside, inventory.largest_parameter * size // max(1, inventory.parameters)))
    return (*([largest] * (outside // largest)), *layers, outside % largest)


def gathered_bytes(composition: Composition, inventory: Inventory, *, whole: bool) -> int:
    return gather_for_generation_bytes(
        inventory,
        Sharding.of({"kind": composition.sharded_by, "ranks": composition.ranks}),
        whole=whole,
        bytes_per_parameter=inventory.weight_bytes / max(1, inventory.parameters),
    )

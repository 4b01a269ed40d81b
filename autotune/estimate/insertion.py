"""Allocations outside the traced step, inserted into it: a rollout in the trainer's own allocator,
the weight sync.

Such a rollout reads the prompts in one pass; then a cache grows token by token. A sync holds
gathered weights, merged adapters and buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from autotune.core.composition import Composition
from autotune.core.measurement import Phase
from autotune.core.trace import Inventory, Mark, Part, Trace
from autotune.core.units import format_bytes
from autotune.estimate import model_shape
from autotune.estimate.model_shape import Shape
from autotune.estimate.transformers_generation import (
    SCORE_BYTES,
    PrefillSizes,
    cache_bytes,
    prefill_events,
    prefill_sizes,
    sizes_of,
    transformers_generation,
)
from autotune.worker.releases import release_numbers

GROWTH_LENGTHS = 64  # lengths at which a growing cache is replayed: steps of a few percent at most
LAYER_PIECES = 4  # large parameters of a decoder layer
PIECES = 8  # allocations that stand for a sum whose parts are unknown

SYNC_STREAM = (
    64  # streams of the weight sync are numbered from here on, apart from those of the sharding
)
MERGE_BYTES_PER_WEIGHT = (
    4 + 4 + 2
)  # per weight of the largest adapted matrix: B·A, the same scaled, in the weights' dtype

TRL_PACKS_FROM = (1, 11)
"""First release of TRL that sends packed buffers to its server; earlier ones send one parameter
at a time.
"""


@dataclass(frozen=True, kw_only=True)
class Insertion:
    """Allocations right before an event of the trace."""

    event: int
    sizes: Sequence[int]
    parts: Sequence[Part]  # part of each allocation
    order: Sequence[
        int
    ]  # own events, encoded as in a trace: n+1 makes allocation n, -(n+1) frees it
    phase: Phase | None = None  # None: the running phase
    step: int = 0
    streams: Mapping[int, int] = field(
        default_factory=dict
    )  # own allocation -> stream; absent: compute


def inserted(trace: Trace, insertions: Iterable[Insertion]) -> Trace:
    """Return the trace with these insertions, in the order of their events."""
    sizes, parts = list(trace.sizes), list(trace.parts)
    names, streams = list(trace.part_names), dict(trace.streams)
    events: list[int] = []
    marks: list[Mark] = []
    pending, done = list(trace.marks), 0

    def copy(end: int) -> None:
        """Copy the trace's own events up to `end`, with the marks before it."""
        nonlocal done
        offset = len(events) - done
        while pending and (pending[0].event < end or end == len(trace.events)):
            mark = pending.pop(0)
            marks.append(replace(mark, event=mark.event + offset))
        events.extend(trace.events[done:end])
        done = end

    for insertion in sorted(insertions, key=lambda one: one.event):
        copy(insertion.event)
        first = len(sizes)
        sizes += insertion.sizes
        streams |= {first + number: stream for number, stream in insertion.streams.items()}
        for part in insertion.parts:
            if part not in names:
                names.append(part)
            parts.append(names.index(part))
        if insertion.phase is not None:
            marks.append(Mark(event=len(events), phase=insertion.phase, step=insertion.step))
        events += [entry + first if entry > 0 else entry - first for entry in insertion.order]
        if insertion.phase is not None and not (pending and pending[0].event == insertion.event):
            running = next(mark for mark in reversed(trace.marks) if mark.event <= insertion.event)
            marks.append(replace(running, event=len(events)))
    copy(len(trace.events))
    last = {mark.event: mark for mark in marks}  # the last of several marks at one event counts
    return replace(
        trace,
        sizes=tuple(sizes),
        parts=tuple(parts),
        part_names=tuple(names),
        events=tuple(events),
        streams=streams,
        marks=tuple(last[event] for event in sorted(last)),
    )


# Rollout in the trainer.


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
    gathered: tuple[
        int, ...
    ] = ()  # weights of all ranks, held here meanwhile beside this rank's part
    gathers_like_step: bool = (
        False  # each of its passes gathers weights as the step's forward pass does
    )


@dataclass(frozen=True, kw_only=True)
class PassGathering:
    """What a forward pass gathers, layer by layer; events as in an insertion."""

    sizes: tuple[int, ...]
    streams: tuple[int, ...]
    order: tuple[int, ...]
    turn: int  # events before a layer computes, all that it needs gathered
    kept: tuple[int, ...]  # what is there until the end: frees of it


def trainer_rollout(composition: Composition, shape: Shape, trace: Trace) -> Generation:
    """Return one rank's rollout: its part of the batch, at once or in smaller batches."""
    dtype = composition["policy"].dtype
    batch = composition.generation_micro_batch or max(
        1, composition.generation_batch // composition.ranks
    )
    prompt, completion = composition.prompt_length, composition.completion_length
    parts = transformers_generation(
        shape, dtype=dtype, batch=batch, prompt=prompt, completion=completion
    )
    element = model_shape.dtype_bytes(dtype)
    whole = cache_bytes(shape, element, batch, prompt + completion - 1)
    at_prefill = parts["kv_cache"] < whole
    # Weights of other ranks: all at once, or the running layer and the next.
    at_once = not composition.gathers_per_token and composition.sharded_by == "zero3"
    size = gathered_bytes(composition, trace.inventory, whole=at_once)
    if size and not at_once:
        size = max(size, 2 * max(trace.inventory.layer_bytes, default=0))
    pieces = (
        tuple(size // PIECES + (piece < size % PIECES) for piece in range(PIECES)) if size else ()
    )
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


def rollout(
    generation: Generation,
    event: int,
    step: int,
    workspace_bytes: int,
    gathering: PassGathering | None = None,
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
        int(generation.kv_cache_bytes * (generation.prompt_length + at / lengths * more) / longest)
        // tensors
        for at in range(lengths + 1)
    ]
    sampled = (generation.logits_bytes, generation.scores_bytes, generation.scores_bytes)
    prefill = sizes_of(generation.prefill, cached[0], workspace_bytes)
    # Sizes in the order of `_growth_events`.
    gathered = generation.gathered if gathering is None else gathering.sizes
    sizes = [
        *gathered,
        *(prefill[name] for name in prefill_events(tensors // 2, frozenset(prefill)).names),
        *sampled,
    ]
    for length in cached[1:]:
        sizes += [*[length] * tensors, generation.decode_bytes, *sampled]
    whole = (
        tuple(range(1, len(gathered) + 1)),
        len(gathered),
        tuple(-one for one in range(1, len(gathered) + 1)),
    )
    walk = whole if gathering is None else (gathering.order, gathering.turn, gathering.kept)
    parts, order = _growth_events(tensors, lengths, len(gathered), walk, frozenset(prefill))
    streams = {} if gathering is None else dict(enumerate(gathering.streams))
    return Insertion(
        event=event,
        sizes=tuple(sizes),
        parts=parts,
        order=order,
        phase="rollout",
        step=step,
        streams=streams,
    )


@cache
def _growth_events(
    tensors: int,
    lengths: int,
    gathered: int,
    walk: tuple[tuple[int, ...], int, tuple[int, ...]],
    prefill: frozenset[str],
) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """Return a rollout's parts and events; thousands of them, the same for all sizes."""
    parts: list[Part] = []
    order: list[int] = []

    def make(part: Part) -> int:
        parts.append(part)
        order.append(len(parts))
        return len(parts)

    def sample(last: Sequence[int]) -> list[int]:
        """Sample one token: scores and probabilities, each of which replaces that of the last
        token.
        """
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


# Gathered weights.


def gathered_bytes(composition: Composition, inventory: Inventory, *, whole: bool) -> int:
    """Bytes gathered for the rollout or a sync, beside this rank's part: all weights, or one
    parameter at a time.
    """
    if composition.sharded_by not in ("zero3", "fsdp1", "fsdp2") or composition.ranks == 1:
        return 0
    count = inventory.parameters if whole else inventory.largest_parameter
    return round(count * (inventory.weight_bytes / max(1, inventory.parameters)))


def gathered_pieces(size: int, trace: Trace) -> tuple[int, ...]:
    """Divide gathered weights by parameter: each has a block of its own.

    Without a trace of the parameters: a few for each layer, and the largest ones outside.
    """
    inventory = trace.inventory
    if not size:
        return ()
    if trace.usage is not None:
        return tuple(parameter.size for parameter in trace.usage.parameters)
    layers = [
        one for layer in inventory.layer_bytes for one in [layer // LAYER_PIECES] * LAYER_PIECES
    ]
    outside = max(0, size - sum(layers))
    # By the mean size of a parameter, which adapters of another precision raise a little.
    largest = max(
        1, min(outside, inventory.largest_parameter * size // max(1, inventory.parameters))
    )
    return (*([largest] * (outside // largest)), *layers, outside % largest)


# Weight sync.


def packs(composition: Composition, versions: Mapping[str, str]) -> bool:
    """Return True if weights are sent in packed buffers, two of which are held at a time."""
    return (
        composition.sync_gathers == "packed"
        and release_numbers(versions.get("trl") or "") >= TRL_PACKS_FROM
    )


def sync_blocks(
    composition: Composition, config: Mapping[str, object], trace: Trace
) -> Iterator[tuple[Part, int]]:
    """Yield gathered weights, the merged adapter.

    With adapters ZeRO-3 gathers all weights to merge them, in as many parts as the framework
    states; otherwise one parameter at a time. An adapter pushed alone is too small to count, unless
    its framework gathers the base weights for it as well.
    """
    if composition.generation not in ("engine", "server"):
        return
    adapters = composition["policy"].adapter_rank is not None
    whole = adapters and composition.sharded_by == "zero3"
    packed = packs(composition, trace.versions)
    if packed:
        yield from (("communication", size) for size in packed_blocks(composition, trace))
    elif composition.sync_gathers not in (None, "packed"):
        yield "communication", _sent_bytes(composition, config, trace.inventory)
        return
    if composition.syncs_adapter_only and not composition.first_sync_is_whole:
        return
    size = gathered_bytes(composition, trace.inventory, whole=whole)
    if whole:
        yield from (
            ("communication", one // composition.sync_parts) for one in gathered_pieces(size, trace)
        )
    elif not packed:
        yield "communication", size
    if adapters and not packed:  # merged one module at a time; a buffer, made afterwards, is larger
        largest = _largest_adapted(composition, trace)
        if not largest:
            shape = model_shape.shape(config)
            widest = max(max(layer.width, layer.expert_width) for layer, _ in shape.kinds)
            largest = shape.hidden * max(widest, shape.heads * shape.head_dim)
        yield "workspaces", MERGE_BYTES_PER_WEIGHT * largest


def _largest_adapted(composition: Composition, trace: Trace) -> int:
    """Return the elements of the largest adapted matrix, from the sizes of A and B; 0 if they
    are not whole in the trace.
    """
    rank, held = composition["policy"].adapter_rank, trace.inventory
    loaded = next((mark.event for mark in trace.marks if mark.phase != "load"), 0)
    numbers = (entry - 1 for entry in trace.events[:loaded] if entry > 0)
    sizes = [
        trace.sizes[number]
        for number in numbers
        if trace.part_names[trace.parts[number]] == "adapters"
    ]
    if not rank or len(sizes) % 2 or sum(sizes) != held.trainable_bytes:
        return 0
    width = held.trainable_bytes // max(1, held.trainable_parameters)
    return max(
        (a * b // (rank * width) ** 2 for a, b in zip(sizes[::2], sizes[1::2], strict=True)),
        default=0,
    )


def receiving_failure(composition: Composition, trace: Trace, room_bytes: float) -> str | None:
    """Return the error of a server that has no room for the two buffers beside its engine's
    share.
    """
    if not packs(composition, trace.versions):
        return None
    buffers = sum(packed_blocks(composition, trace)[:2])
    if buffers <= room_bytes:
        return None
    return (
        f"CUDA out of memory on the server's GPU: it receives weights in {format_bytes(buffers)}"
        " beside its engine's share."
    )


def _sent_bytes(
    composition: Composition, config: Mapping[str, object], inventory: Inventory
) -> int:
    """Return what a rank holds at most while it sends weights in the precision of its shards.

    The buffer is made after the copies. A layer or a model is gathered before it, and no longer
    there.
    """
    width, buffer = (
        model_shape.dtype_bytes(composition["policy"].dtype),
        composition.sync_buffer_bytes,
    )
    per_byte = inventory.parameters / max(1, inventory.weight_bytes)
    shape, apart = model_shape.shape(config), composition.ranks > 1
    layer = max(inventory.layer_bytes, default=0)
    root = inventory.weight_bytes - sum(inventory.layer_bytes)
    if composition.sync_gathers == "model":
        return max(buffer, inventory.parameters * width * apart)
    if composition.sync_gathers == "layer":
        return max(buffer, round(max(layer, root) * per_byte) * width * apart)
    largest = inventory.largest_parameter * width * apart
    if composition.sync_gathers == "parameter":
        return largest + buffer
    # A state dict names a tied head again. A unit's whole parameters and a copy of the largest are
    # there before the buffer.
    named = inventory.parameters + (0 if shape.head else shape.embedding)
    return (
        named * width // composition.ranks
        + largest
        + max(buffer, round(max(layer, root) * per_byte) * width * apart)
    )


def packed_blocks(composition: Composition, trace: Trace) -> tuple[int, ...]:
    """Return two packed buffers in the trained precision, and what is gathered for the larger one,
    unless adapters are merged into weights that are all gathered.

    `packed_nccl_broadcast_producer` of vLLM collects parameters until they exceed the buffer's
    size, and concatenates them while the buffer before is sent. Sharded ones are gathered first.
    Each buffer is on a stream of its own, made anew for each sync: no later sync finds the blocks
    of an earlier one.
    """
    policy, inventory = composition["policy"], trace.inventory
    # 1. The parameters' sizes as they are sent: embedding, layers, and last a head of its own.
    scale = (
        inventory.parameters
        * model_shape.dtype_bytes(policy.dtype)
        / max(1, inventory.weight_bytes)
    )
    pieces = [round(one * scale) for one in gathered_pieces(inventory.weight_bytes, trace)]
    head = (
        1
        if trace.usage is None and len(pieces) > 1 and pieces[0] == pieces[1] == max(pieces)
        else 0
    )
    # 2. Buffers.
    buffers: list[int] = [0]
    for size in (*pieces[head:], *pieces[:head]):
        if buffers[-1] > composition.sync_buffer_bytes:
            buffers.append(0)
        buffers[-1] += size
    gathered = (
        max(buffers) if policy.sharding == "parameters" and policy.adapter_rank is None else 0
    )
    return max(buffers[::2]), max(buffers[1::2], default=0), gathered

"""Context of a traced step: inserted allocations, and points where the cache is emptied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from autotune.catalog import Gpu
from autotune.core.composition import Composition
from autotune.core.measurement import Phase
from autotune.core.trace import Inventory, Mark, Part, Trace
from autotune.estimate import constant_estimates, model_shape, transformers_generation, vllm_engine
from autotune.estimate.allocator import AllocatorSettings
from autotune.estimate.generation_prefill import PrefillSizes, prefill_events, prefill_sizes, sizes_of
from autotune.estimate.sharding import Sharding, gather_for_generation_bytes


@dataclass(frozen=True, kw_only=True)
class Insertion:
    """Allocations right before an event of the trace."""

    event: int
    sizes: Sequence[int]
    parts: Sequence[Part]  # part of each allocation
    order: Sequence[int]  # own events, encoded as in a trace: n+1 makes allocation n, -(n+1) frees it
    phase: Phase | None = None  # None: the running phase
    step: int = 0
    streams: Mapping[int, int] = dataclasses.field(default_factory=dict)  # own allocation -> stream; absent: compute


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
            marks.append(dataclasses.replace(mark, event=mark.event + offset))
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
            marks.append(dataclasses.replace(running, event=len(events)))
    copy(len(trace.events))
    last = {mark.event: mark for mark in marks}  # the last of several marks at one event counts
    return dataclasses.replace(
        trace,
        sizes=tuple(sizes),
        parts=tuple(parts),
        part_names=tuple(names),
        events=tuple(events),
        streams=streams,
        marks=tuple(last[event] for event in sorted(last)),
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
class TraceContext:
    """Memory events around the traced step, on its device."""

    cublas_workspace_bytes: int = 0
    generation: Generation | None = None
    sync: tuple[tuple[Part, int], ...] = ()  # blocks held together by the weight sync: gathered weights, a merged adapter
    first_sync: tuple[tuple[Part, int], ...] = ()  # further ones of the first sync
    sync_streams: bool = False  # each block is on a stream of its own, and on another one in each sync
    loads_at_once: bool = False  # one block for all weights is requested and freed before they are loaded
    empties_before_rollout: bool = False  # cache emptied before and after each rollout, as an offloaded engine does
    empty_cache_steps: int | None = None  # cache emptied before the backward passes of every n-th step
    settings: AllocatorSettings = dataclasses.field(default_factory=AllocatorSettings)


def loaded_once(trace: Trace) -> Trace:
    """Assign work that is marked as loading between two phases, or as a forward pass after the last
    backward pass, to the phase before it."""
    marks: list[Mark] = []
    for mark in trace.marks:
        before = next((one.phase for one in reversed(marks) if one.phase != "load"), None)
        marks.append(mark if mark.phase != "load" or before is None else dataclasses.replace(mark, phase=before))
    return dataclasses.replace(trace, marks=tuple(_without_late_forward(marks)))


def _without_late_forward(marks: Sequence[Mark]) -> Iterator[Mark]:
    """Yield the marks; what lies between the last backward pass and the optimizer's step, such as
    clipping, is no forward pass."""
    found: list[Mark] = []
    late = False
    for mark in reversed(marks):
        late = mark.phase == "optimizer" or (late and mark.phase == "forward")
        found.append(dataclasses.replace(mark, phase="backward") if late and mark.phase == "forward" else mark)
    return reversed(found)


@dataclass(frozen=True, kw_only=True)
class PassGathering:
    """What a forward pass gathers, layer by layer; events as in an insertion."""

    sizes: tuple[int, ...]
    streams: tuple[int, ...]
    order: tuple[int, ...]
    turn: int  # events before a layer computes, all that it needs gathered
    kept: tuple[int, ...]  # what is there until the end: frees of it


@dataclass(frozen=True, kw_only=True)
class Places:
    """Events of a step at which contexts insert; the same for every context."""

    loaded_bytes: int
    multiplying: tuple[int, ...]  # events after which a thread has a cuBLAS workspace
    cycles: tuple[tuple[int, int], ...]  # (event, step) of each rollout
    gathering: PassGathering | None = None  # of the first forward pass


def places_in(trace: Trace) -> Places:
    return Places(
        loaded_bytes=_loaded_weights(trace),
        multiplying=tuple(_first_products(trace)),
        cycles=tuple(_cycles(trace)),
        gathering=_pass_gathering(trace),
    )


def _pass_gathering(trace: Trace) -> PassGathering | None:
    """Return what the first forward pass of a sharded step gathers; None: nothing."""
    numbers: dict[int, int] = {}
    order: list[int] = []
    phase: Phase | None = None
    for mark, span in trace.stretches():
        if mark.phase not in ("score", "forward") or (phase is not None and mark.phase != phase):
            if phase is not None:
                break
            continue
        for entry in (trace.events[at] for at in span):
            number = abs(entry) - 1
            if entry > 0 and trace.part_names[trace.parts[number]] == "communication":
                numbers[number] = len(numbers)
                phase = mark.phase
            if number in numbers:
                order.append(numbers[number] + 1 if entry > 0 else -(numbers[number] + 1))
    if not numbers:
        return None
    sizes, freed = [trace.sizes[number] for number in numbers], {-entry for entry in order if entry < 0}
    return PassGathering(
        sizes=tuple(sizes),
        streams=tuple(trace.streams.get(number, 0) for number in numbers),
        order=tuple(order),
        turn=_inside_a_layer(order, sizes),
        kept=tuple(-one for one in range(1, len(sizes) + 1) if one not in freed),
    )


def _inside_a_layer(order: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the number of events up to the highest point after the largest buffer, the root's, was given back."""
    live = top = found = 0
    given_back = False
    for at, entry in enumerate(order):
        live += sizes[abs(entry) - 1] * (1 if entry > 0 else -1)
        given_back = given_back or (entry < 0 and sizes[-entry - 1] == max(sizes))
        if given_back and live > top:
            top, found = live, at + 1
    return found or len(order)


def _cycles(trace: Trace) -> Iterator[tuple[int, int]]:
    """Yield the rollouts: one before the first step, whose cache the step meets, and one with all state."""
    second = second_cycle(trace)
    if second is None:
        return
    first = next(mark for mark in trace.marks if mark.phase != "load")
    if first.event < second:
        yield first.event, first.step
    yield second, next(mark.step for mark in reversed(trace.marks) if mark.event <= second)


def insertions(places: Places, context: TraceContext) -> Iterator[Insertion]:
    if context.loads_at_once and places.loaded_bytes:
        yield Insertion(event=0, sizes=(places.loaded_bytes,), parts=("weights",), order=(1, -1), phase="load")
    # The first product of the main thread is one of the first rollout, where the trainer generates.
    generates = context.generation is not None and bool(places.cycles)
    for event in places.multiplying[generates:] if context.cublas_workspace_bytes else ():
        yield Insertion(event=event, sizes=(context.cublas_workspace_bytes,), parts=("workspaces",), order=(1,))
    for number, (event, step) in enumerate(places.cycles):
        blocks = context.first_sync + context.sync if number == 0 else context.sync
        if blocks:
            parts, sizes = zip(*blocks, strict=True)
            made = range(1, len(sizes) + 1)
            order = (*made, *(-one for one in made))
            first = SYNC_STREAM + number * len(blocks)
            streams = {at: first + at for at in range(len(blocks))} if context.sync_streams else {}
            yield Insertion(event=event, sizes=sizes, parts=parts, order=order, phase="sync", step=step, streams=streams)
        if context.generation is not None:
            workspace = context.cublas_workspace_bytes if number == 0 else 0
            gathering = places.gathering if context.generation.gathers_like_step else None
            yield _rollout(context.generation, event, step, workspace, gathering)


def _loaded_weights(trace: Trace) -> int:
    """Return the weights held after loading; adapters, made later, excluded."""
    first = next((mark.event for mark in trace.marks if mark.phase != "load"), len(trace.events))
    end = first if any(mark.phase == "load" for mark in trace.marks) else 0
    return trace.live_parts_at(end - 1).get("weights", 0) if end else 0


def _first_products(trace: Trace) -> Iterator[int]:
    """Yield the event after the first product of each cuBLAS thread: the forward pass's and autograd's."""
    if trace.products:
        yield from (trace.events.index(number + 1) + 1 for number in trace.products)
        return
    for phases in (("score", "forward"), ("backward",)):
        first = next((span for mark, span in trace.stretches() if mark.phase in phases and len(span)), None)
        if first is not None:
            yield first.start + 1


def second_cycle(trace: Trace) -> int | None:
    """Return the event of the next rollout; the end if one step was traced."""
    loaded = False
    for mark in trace.marks:
        if mark.step >= 1 and mark.phase != "load":
            return mark.event
        loaded = loaded or mark.phase == "load"
    return len(trace.events) if loaded and len(trace.marks) > 1 else None


SYNC_STREAM = 64  # streams of the weight sync are numbered from here on, apart from those of the sharding
GROWTH_LENGTHS = 64  # lengths at which a growing cache is replayed: steps of a few percent at most
LAYER_PIECES = 4  # large parameters of a decoder layer
PIECES = 8  # allocations that stand for a sum whose parts are unknown


def _rollout(
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
    tensors: int,
    lengths: int,
    gathered: int,
    walk: tuple[tuple[int, ...], int, tuple[int, ...]],
    prefill: frozenset[str],
) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """Return a rollout's parts and events; thousands of them, the same for all sizes."""
    parts: list[Part] = []
    order: list[int] = []

    def make(count: int, part: Part) -> list[int]:
        made = list(range(len(parts) + 1, len(parts) + 1 + count))
        parts.extend([part] * count)
        order.extend(made)
        return made

    gathering, turn, kept = walk
    parts.extend(["communication"] * gathered)
    order.extend(gathering[:turn])
    prompts, first = prefill_events(tensors // 2, prefill), len(parts)
    parts.extend(prompts.parts)
    order.extend(entry + first if entry > 0 else entry - first for entry in prompts.order)
    held = [one + first for one in prompts.cache]
    order.extend(gathering[turn:])
    scores = _sampled(make, order, ())
    for _ in range(lengths):
        for at, old in enumerate(held):
            (held[at],) = make(1, "kv_cache")
            order.append(-old)
        order.extend(-one for one in make(1, "activations"))
        scores = _sampled(make, order, scores)
    order.extend((*(-one for one in (*held, *scores)), *kept))
    return tuple(parts), tuple(order)


def _sampled(make: Callable[[int, Part], list[int]], order: list[int], last: Sequence[int]) -> list[int]:
    """Sample one token: scores and probabilities, each of which replaces that of the last token."""
    (logits,) = make(1, "logits")
    new: list[int] = []
    for old in last or (None, None):
        new += make(1, "logits")
        if old is not None:
            order.append(-old)
    order.append(-logits)
    return new


def _pieces(size: int) -> list[int]:
    return [size // PIECES + (1 if piece < size % PIECES else 0) for piece in range(PIECES)] if size else []


def emptied(whole: Trace, context: TraceContext) -> Iterator[int]:
    """Yield the events before which the cache is emptied."""
    yield from (whole.events.index(number + 1) for number in whole.emptied)
    previous: Phase | None = None
    begun: set[int] = set()
    for mark, span in whole.stretches():
        if not len(span) or mark.phase == previous:
            continue
        begins = mark.phase != "load" and mark.step not in begun
        generated = previous in ("rollout", "sync") and mark.phase not in ("rollout", "sync")
        if context.empties_before_rollout and (begins or generated):
            yield span.start
        every = context.empty_cache_steps
        if mark.phase == "backward" and every and mark.step % every == 0:
            yield span.start
        begun |= {mark.step} if begins else set()
        previous = mark.phase


LOADS_AT_ONCE_FROM = (4, 50)
"""First transformers release that requests all weights in one block before loading."""

MERGE_BYTES_PER_WEIGHT = 4 + 4 + 2
"""Per weight of the largest adapted matrix: B·A, the same scaled, in the weights' dtype."""


def step_context(
    composition: Composition,
    config: Mapping[str, object],
    *,
    gpu: Gpu | None,
    trace: Trace,
    settings: Mapping[str, object],
    allocator: AllocatorSettings,
    on_cpu: bool = False,
) -> TraceContext:
    every = settings.get("torch_empty_cache_steps")
    return TraceContext(
        cublas_workspace_bytes=0 if on_cpu else constant_estimates.cublas_workspace(gpu),
        generation=_generation(composition, config, trace) if composition.generation == "trainer" else None,
        sync=(sync := tuple(block for block in _sync(composition, config, trace) if block[1])),
        first_sync=tuple(block for block in sync if block[0] == "communication") if _sends_base_first(composition) else (),
        sync_streams=composition.sync_gathers == "packed",
        loads_at_once=not on_cpu and _loads_at_once(composition, trace),
        empties_before_rollout=composition.empties_rollout_cache or (composition.engine is not None and composition.engine.sleep),
        empty_cache_steps=every if isinstance(every, int) and every > 0 else None,
        settings=allocator,
    )


def _loads_at_once(composition: Composition, trace: Trace) -> bool:
    """Return True if the model is loaded straight onto the device: on one rank, or quantised."""
    version = trace.versions.get("transformers", "")
    known = tuple(int(number) for number in version.split(".")[:2] if number.isdigit())
    straight = composition.ranks == 1 or composition["policy"].quantised_bits is not None
    return trace.basis == "traced" and straight and known >= LOADS_AT_ONCE_FROM


def _generation(composition: Composition, config: Mapping[str, object], trace: Trace) -> Generation:
    """Return one rank's rollout: its part of the batch, at once or in smaller batches."""
    dtype = composition["policy"].dtype
    batch = composition.generation_micro_batch or max(1, composition.generation_batch // composition.ranks)
    prompt, completion = composition.prompt_length, composition.completion_length
    parts = transformers_generation.transformers_generation(
        config, dtype=dtype, batch=batch, prompt=prompt, completion=completion
    )
    shape = model_shape.shape(config)
    whole = transformers_generation.cache_bytes(shape, model_shape.dtype_bytes(dtype), batch, prompt + completion - 1)
    at_prefill = parts["kv_cache"] < whole
    # Weights of other ranks: all at once, or the running layer and the next.
    at_once = not composition.gathers_per_token and composition.sharded_by == "zero3"
    size = _gathered_bytes(composition, trace.inventory, whole=at_once)
    if size and not at_once:
        size = max(size, 2 * max(trace.inventory.layer_bytes, default=0))
    gathered = _gathered_pieces(size, trace) if at_once else tuple(_pieces(size))
    return Generation(
        kv_cache_bytes=whole,
        logits_bytes=batch * shape.vocabulary * model_shape.dtype_bytes(dtype),
        scores_bytes=batch * shape.vocabulary * transformers_generation.SCORE_BYTES,
        prefill=prefill_sizes(shape, dtype=dtype, batch=batch, prompt=prompt),
        decode_bytes=0 if at_prefill else parts["activations"],
        layers=len(shape.layers),
        prompt_length=prompt,
        completion_length=completion,
        gathered=gathered,
        gathers_like_step=bool(size) and not at_once,
    )


def _gathered_pieces(size: int, trace: Trace) -> tuple[int, ...]:
    """Divide gathered weights by parameter: each has a block of its own.

    Without a trace of the parameters: a few for each layer, and the largest ones outside.
    """
    inventory = trace.inventory
    if not size:
        return ()
    if trace.usage is not None:
        return tuple(parameter.size for parameter in trace.usage.parameters)
    layers = [one for layer in inventory.layer_bytes for one in [layer // LAYER_PIECES] * LAYER_PIECES]
    outside, largest = max(0, size - sum(layers)), max(1, inventory.largest_parameter * size // max(1, inventory.parameters))
    return (*([largest] * (outside // largest)), *layers, outside % largest)


def _gathered_bytes(composition: Composition, inventory: Inventory, *, whole: bool) -> int:
    return gather_for_generation_bytes(
        inventory,
        Sharding.of({"kind": composition.sharded_by, "ranks": composition.ranks}),
        whole=whole,
        bytes_per_parameter=inventory.weight_bytes / max(1, inventory.parameters),
    )


def _sends_base_first(composition: Composition) -> bool:
    """Return True if the base weights are sent before the first adapter: the last part sent is still
    referenced while the adapter's part is gathered and merged."""
    return composition.syncs_adapter_only and composition.first_sync_is_whole


def _sync(composition: Composition, config: Mapping[str, object], trace: Trace) -> Iterator[tuple[Part, int]]:
    """Yield gathered weights, the merged adapter, the slice for a tensor-parallel rank.

    With adapters ZeRO-3 gathers all weights to merge them, in as many parts as the framework
    states; otherwise one parameter at a time. An adapter pushed alone is too small to count, unless
    its framework gathers the base weights for it as well.
    """
    if composition.generation not in ("engine", "server"):
        return
    if composition.sync_gathers == "packed":
        yield from (("communication", size) for size in _packed_blocks(composition, trace.inventory))
        return
    if composition.sync_gathers is not None:
        yield "communication", _sent_bytes(composition, config, trace.inventory)
        return
    if composition.syncs_adapter_only and not composition.first_sync_is_whole:
        return
    adapters = composition["policy"].adapter_rank is not None
    whole = adapters and composition.sharded_by == "zero3"
    size = _gathered_bytes(composition, trace.inventory, whole=whole)
    if whole:
        yield from (("communication", one // composition.sync_parts) for one in _gathered_pieces(size, trace))
    else:
        yield "communication", size
    if adapters:  # merged one module at a time, before the push
        shape = model_shape.shape(config)
        widest = max(max(layer.width, layer.expert_width) for layer, _ in shape.kinds)
        yield "workspaces", MERGE_BYTES_PER_WEIGHT * shape.hidden * max(widest, shape.heads * shape.head_dim)
    if composition.engine is not None:
        dtype, tensor_parallel = composition["policy"].dtype, composition.engine.tensor_parallel
        yield "workspaces", vllm_engine.sync_bytes(config, dtype=dtype, tensor_parallel=tensor_parallel)


def _sent_bytes(composition: Composition, config: Mapping[str, object], inventory: Inventory) -> int:
    """Return what a rank holds at most while it sends weights in the precision of its shards.

    The buffer is made after the copies. A layer or a model is gathered before it, and no longer there.
    """
    width, buffer = model_shape.dtype_bytes(composition["policy"].dtype), composition.sync_buffer_bytes
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
    # A state dict names a tied head again. A unit's whole parameters and a copy of the largest are there before the buffer.
    named = inventory.parameters + (0 if shape.head else shape.embedding)
    return named * width // composition.ranks + largest + max(buffer, round(max(layer, root) * per_byte) * width * apart)


def _packed_blocks(composition: Composition, inventory: Inventory) -> tuple[int, ...]:
    """Return two packed buffers, one of them overshot by the last parameter in it, in the trained precision,
    and what is gathered for the second one.

    `packed_nccl_broadcast_producer` of vLLM collects parameters until they exceed the buffer's size, and
    concatenates them while the buffer before is sent. Sharded ones are gathered first. Each buffer is on a
    stream of its own, made anew for each sync: no later sync finds the blocks of an earlier one.
    """
    width = model_shape.dtype_bytes(composition["policy"].dtype)
    whole, buffer = inventory.parameters * width, composition.sync_buffer_bytes
    chunk = min(whole, buffer + inventory.largest_parameter * width)
    gathered = chunk if composition["policy"].sharding == "parameters" else 0
    return chunk, min(buffer, whole - chunk), gathered

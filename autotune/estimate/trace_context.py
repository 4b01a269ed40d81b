"""Context of a traced step: inserted allocations, and points where the cache is emptied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.catalog import Gpu
from autotune.core.composition import Composition
from autotune.core.measurement import Phase
from autotune.core.trace import Mark, Part, Trace
from autotune.estimate import constant_estimates, engine_start, vllm_engine
from autotune.estimate.allocator import AllocatorSettings
from autotune.estimate.insertion import Insertion
from autotune.estimate.trainer_rollout import Generation, PassGathering, rollout, trainer_rollout
from autotune.estimate.weight_sync import SYNC_STREAM, packed_blocks, packs, sends_base_first, sync_blocks
from autotune.worker.releases import release_numbers


@dataclass(frozen=True, kw_only=True)
class TraceContext:
    """Memory events around the traced step, on its device."""

    cublas_workspace_bytes: int = 0
    engine_inputs_bytes: int | None = None  # buffer of an engine in this process, which also makes the first product
    engine_starts_first: bool = False  # before the model is on the device
    generation: Generation | None = None
    sync: tuple[tuple[Part, int], ...] = ()  # blocks held together by the weight sync: gathered weights, a merged adapter
    first_sync: tuple[tuple[Part, int], ...] = ()  # further ones of the first sync
    sync_streams: int = 0  # of its first blocks, each is on a stream of its own, and on another one in each sync
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
class Places:
    """Events of a step at which contexts insert; the same for every context."""

    loaded_bytes: int
    prepared_event: int  # the first after the weights are there, before they are prepared for training on several ranks
    multiplying: tuple[int, ...]  # events after which a thread has a cuBLAS workspace
    cycles: tuple[tuple[int, int], ...]  # (event, step) of each rollout
    gathering: PassGathering | None = None  # of the first forward pass


def places_in(trace: Trace) -> Places:
    return Places(
        loaded_bytes=_loaded_weights(trace),
        prepared_event=_prepared_event(trace),
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
    # The first product of the main thread is the engine's, or one of the first rollout, where the trainer generates.
    generates = context.generation is not None and bool(places.cycles)
    if context.engine_inputs_bytes is not None:
        generates, event = True, 0 if context.engine_starts_first else places.prepared_event
        sizes = (context.engine_inputs_bytes, context.cublas_workspace_bytes)
        yield Insertion(event=event, sizes=sizes, parts=("inputs", "workspaces"), order=(1, 2))
    for event in places.multiplying[generates:] if context.cublas_workspace_bytes else ():
        yield Insertion(event=event, sizes=(context.cublas_workspace_bytes,), parts=("workspaces",), order=(1,))
    for number, (event, step) in enumerate(places.cycles):
        blocks = context.first_sync + context.sync if number == 0 else context.sync
        if blocks:
            parts, sizes = zip(*blocks, strict=True)
            made = range(1, len(sizes) + 1)
            order = (*made, *(-one for one in made))
            first = SYNC_STREAM + number * context.sync_streams
            streams = {at: first + at for at in range(context.sync_streams)}
            yield Insertion(event=event, sizes=sizes, parts=parts, order=order, phase="sync", step=step, streams=streams)
        if context.generation is not None:
            workspace = context.cublas_workspace_bytes if number == 0 else 0
            gathering = places.gathering if context.generation.gathers_like_step else None
            yield rollout(context.generation, event, step, workspace, gathering)


def _loaded_weights(trace: Trace) -> int:
    """Return the weights held after loading. Adapters and the statistics of quantised weights are made later."""
    end = _load_end(trace)
    held = trace.live_parts_at(end - 1).get("weights", 0) if end else 0
    return max(0, held - trace.inventory.statistics_bytes)


def _prepared_event(trace: Trace) -> int:
    end, apart = _load_end(trace), ("communication", "optimizer")
    for at, entry in enumerate(trace.events[:end]):
        if entry > 0 and (entry - 1 in trace.emptied or trace.part_names[trace.parts[entry - 1]] in apart):
            return at
    return end


def _load_end(trace: Trace) -> int:
    """Return the first event after loading; 0 if nothing is loaded."""
    if not any(mark.phase == "load" for mark in trace.marks):
        return 0
    return next((mark.event for mark in trace.marks if mark.phase != "load"), len(trace.events))


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
    every, packed = settings.get("torch_empty_cache_steps"), packs(composition, trace.versions)
    return TraceContext(
        cublas_workspace_bytes=0 if on_cpu else constant_estimates.cublas_workspace(gpu),
        engine_inputs_bytes=None if on_cpu else vllm_engine.inputs_beside(composition, config),
        engine_starts_first=engine_start.parts(composition) == (),
        generation=trainer_rollout(composition, config, trace) if composition.generation == "trainer" else None,
        sync=(sync := tuple(block for block in sync_blocks(composition, config, trace) if block[1])),
        first_sync=tuple(block for block in sync if block[0] == "communication") if sends_base_first(composition) else (),
        sync_streams=sum(size > 0 for size in packed_blocks(composition, trace)) if packed else 0,
        loads_at_once=not on_cpu and _loads_at_once(composition, trace),
        empties_before_rollout=composition.empties_rollout_cache or (composition.engine is not None and composition.engine.sleep),
        empty_cache_steps=every if isinstance(every, int) and every > 0 else None,
        settings=allocator,
    )


def _loads_at_once(composition: Composition, trace: Trace) -> bool:
    """Return True if the model is loaded straight onto the device: on one rank, or quantised."""
    known = release_numbers(trace.versions.get("transformers") or "0")
    straight = composition.ranks == 1 or composition["policy"].quantised_bits is not None
    return trace.basis == "traced" and straight and known >= LOADS_AT_ONCE_FROM

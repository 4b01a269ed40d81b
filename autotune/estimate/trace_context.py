"""Traced step in its context: allocations inserted around it, and the points where the cache is
emptied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autotune.catalog import Gpu, cublas_workspace
from autotune.core.composition import Composition
from autotune.core.dataset import TokenLengths
from autotune.core.job import Hardware
from autotune.core.measurement import Phase
from autotune.core.trace import Mark, Part, Trace
from autotune.estimate import rollout_engine
from autotune.estimate.allocator import AllocatorSettings
from autotune.estimate.insertion import (
    SYNC_STREAM,
    Generation,
    Insertion,
    PassGathering,
    packed_blocks,
    packs,
    rollout,
    sync_blocks,
    trainer_rollout,
)
from autotune.estimate.model_shape import shape
from autotune.worker.releases import release_numbers

LOADS_AT_ONCE_FROM = (
    4,
    50,
)  # first transformers release that requests all weights in one block before loading


# 1. The context.


@dataclass(frozen=True, kw_only=True)
class PredictionInput:
    """Candidate on one kind of hardware, with everything that decides its memory."""

    candidate_id: str
    composition: Composition
    hardware: Hardware
    gpu: Gpu | None  # catalogue entry of the hardware; None: not in the catalogue, or a CPU
    limit_bytes: int  # per GPU; on a CPU for all ranks together
    config: Mapping[str, object]  # the model's config.json
    trace: Trace  # of the rank with the highest peak, already sharded
    settings: Mapping[str, object] = field(default_factory=dict)
    completions_per_prompt: object = None  # as the framework's setting states them
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)
    host_bytes: int = 0  # per rank, offloaded
    lengths: TokenLengths | None = None  # completions that occur; None: only the longest are known


@dataclass(frozen=True, kw_only=True)
class TraceContext:
    """Memory events around the traced step, on its device."""

    cublas_workspace_bytes: int = 0
    engine_inputs_bytes: int | None = (
        None  # buffer of an engine in this process, which also makes the first product
    )
    engine_starts_first: bool = False  # before the model is on the device
    generation: Generation | None = None
    sync: tuple[
        tuple[Part, int], ...
    ] = ()  # blocks held together by the weight sync: gathered weights, a merged adapter
    first_sync: tuple[tuple[Part, int], ...] = ()  # further ones of the first sync
    sync_streams: int = (
        0  # of its first blocks, each is on a stream of its own, and on another one in each sync
    )
    loads_at_once: bool = (
        False  # one block for all weights is requested and freed before they are loaded
    )
    empties_before_rollout: bool = (
        False  # cache emptied before and after each rollout, as an offloaded engine does
    )
    empty_cache_steps: int | None = (
        None  # cache emptied before the backward passes of every n-th step
    )
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)


def step_context(given: PredictionInput) -> TraceContext:
    composition, config, trace = given.composition, given.config, given.trace
    on_cpu = given.hardware.kind == "cpu"
    every, engine, policy = (
        given.settings.get("torch_empty_cache_steps"),
        composition.engine,
        composition["policy"],
    )
    sync = tuple(block for block in sync_blocks(composition, config, trace) if block[1])
    # The base weights are sent before the first adapter: the last part sent is still referenced
    # while the adapter's part is gathered and merged.
    base_first = composition.syncs_adapter_only and composition.first_sync_is_whole
    # On one rank, or quantised, the model is loaded straight onto the device.
    straight = trace.basis == "traced" and (
        composition.ranks == 1 or policy.quantised_bits is not None
    )
    return TraceContext(
        cublas_workspace_bytes=0 if on_cpu else cublas_workspace(given.gpu),
        engine_inputs_bytes=None if on_cpu else rollout_engine.inputs_beside(composition, config),
        engine_starts_first=parts_at_engine_start(composition) == (),
        generation=(
            trainer_rollout(composition, shape(config), trace)
            if composition.generation == "trainer"
            else None
        ),
        sync=sync,
        first_sync=(
            tuple(block for block in sync if block[0] == "communication") if base_first else ()
        ),
        sync_streams=(
            sum(map(bool, packed_blocks(composition, trace)))
            if packs(composition, trace.versions)
            else 0
        ),
        loads_at_once=(
            straight
            and not on_cpu
            and release_numbers(trace.versions.get("transformers") or "0") >= LOADS_AT_ONCE_FROM
        ),
        empties_before_rollout=composition.empties_rollout_cache
        or (engine is not None and engine.sleep),
        empty_cache_steps=every if isinstance(every, int) and every > 0 else None,
        settings=given.allocator,
    )


def parts_at_engine_start(composition: Composition) -> tuple[str, ...] | None:
    """Return the trainer's parts that exist when an engine in its process starts; None: all of
    them, on one rank.

    Masters, buffers and broadcasts come later. FSDP has the model on the host until then.
    """
    engine = composition.engine
    if engine is None or engine.apart or composition.ranks == 1:
        return None
    return () if composition.sharded_by.startswith("fsdp") else ("weights", "adapters")


# 2. Events of the step at which contexts insert.


@dataclass(frozen=True, kw_only=True)
class Places:
    """Events of a step at which contexts insert; the same for every context."""

    loaded_bytes: int  # weights held after loading
    # the first after the weights are there, before they are prepared for training on several ranks
    prepared_event: int
    multiplying: tuple[int, ...]  # events after which a thread has a cuBLAS workspace
    cycles: tuple[tuple[int, int], ...]  # (event, step) of each rollout
    gathering: PassGathering | None = None  # of the first forward pass


def loaded_once(trace: Trace) -> Trace:
    """Assign work that is marked as loading between two phases to the phase before it, and what
    lies between the last backward pass and the optimizer's step, such as clipping, to the backward
    pass: it is no forward pass.
    """
    marks: list[Mark] = []
    for mark in trace.marks:
        before = next((one.phase for one in reversed(marks) if one.phase != "load"), None)
        marks.append(
            mark if mark.phase != "load" or before is None else replace(mark, phase=before)
        )
    late = False
    for at in reversed(range(len(marks))):
        clipping = late and marks[at].phase == "forward"
        late = marks[at].phase == "optimizer" or clipping
        if clipping:
            marks[at] = replace(marks[at], phase="backward")
    return replace(trace, marks=tuple(marks))


def places_in(trace: Trace) -> Places:
    # 1. The end of loading; 0 if nothing is loaded.
    end = 0
    if any(mark.phase == "load" for mark in trace.marks):
        end = next((mark.event for mark in trace.marks if mark.phase != "load"), len(trace.events))
    weights = trace.live_parts_at(end - 1).get("weights", 0) if end else 0
    prepared = (
        at
        for at, entry in enumerate(trace.events[:end])
        if entry > 0
        and (
            entry - 1 in trace.emptied
            or trace.part_names[trace.parts[entry - 1]] in ("communication", "optimizer")
        )
    )
    # 2. The first product of each cuBLAS thread: the forward pass's and autograd's.
    products = [trace.events.index(number + 1) + 1 for number in trace.products]
    for phases in () if products else (("score", "forward"), ("backward",)):
        first = next(
            (span for mark, span in trace.stretches() if mark.phase in phases and len(span)), None
        )
        products += [] if first is None else [first.start + 1]
    # 3. The rollouts: one before the first step, whose cache the step meets, and one with all state.
    cycles: list[tuple[int, int]] = []
    if (second := second_cycle(trace)) is not None:
        begin = next(mark for mark in trace.marks if mark.phase != "load")
        cycles += [(begin.event, begin.step)] if begin.event < second else []
        cycles.append(
            (second, next(mark.step for mark in reversed(trace.marks) if mark.event <= second))
        )
    return Places(
        loaded_bytes=max(
            0, weights - trace.inventory.statistics_bytes
        ),  # quantised weights' are made later, as adapters are
        prepared_event=next(prepared, end),
        multiplying=tuple(products),
        cycles=tuple(cycles),
        gathering=_pass_gathering(trace),
    )


def second_cycle(trace: Trace) -> int | None:
    """Return the event of the next rollout; the end if one step was traced."""
    loaded = False
    for mark in trace.marks:
        if mark.step >= 1 and mark.phase != "load":
            return mark.event
        loaded = loaded or mark.phase == "load"
    return len(trace.events) if loaded and len(trace.marks) > 1 else None


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
    sizes, freed = (
        [trace.sizes[number] for number in numbers],
        {-entry for entry in order if entry < 0},
    )
    # A layer computes at the highest point after the largest buffer, the root's, was given back.
    live = top = turn = 0
    given_back = False
    for at, entry in enumerate(order):
        live += sizes[abs(entry) - 1] * (1 if entry > 0 else -1)
        given_back = given_back or (entry < 0 and sizes[-entry - 1] == max(sizes))
        if given_back and live > top:
            top, turn = live, at + 1
    return PassGathering(
        sizes=tuple(sizes),
        streams=tuple(trace.streams.get(number, 0) for number in numbers),
        order=tuple(order),
        turn=turn or len(order),
        kept=tuple(-one for one in range(1, len(sizes) + 1) if one not in freed),
    )


def insertions(places: Places, context: TraceContext) -> Iterator[Insertion]:
    if context.loads_at_once and places.loaded_bytes:
        yield Insertion(
            event=0, sizes=(places.loaded_bytes,), parts=("weights",), order=(1, -1), phase="load"
        )
    # The first product of the main thread is the engine's, or one of the first rollout, where the
    # trainer generates.
    generates = context.generation is not None and bool(places.cycles)
    if context.engine_inputs_bytes is not None:
        generates, event = True, 0 if context.engine_starts_first else places.prepared_event
        sizes = (context.engine_inputs_bytes, context.cublas_workspace_bytes)
        yield Insertion(event=event, sizes=sizes, parts=("inputs", "workspaces"), order=(1, 2))
    for event in places.multiplying[generates:] if context.cublas_workspace_bytes else ():
        yield Insertion(
            event=event, sizes=(context.cublas_workspace_bytes,), parts=("workspaces",), order=(1,)
        )
    for number, (event, step) in enumerate(places.cycles):
        blocks = context.first_sync + context.sync if number == 0 else context.sync
        if blocks:
            parts, sizes = zip(*blocks, strict=True)
            made = range(1, len(sizes) + 1)
            order = (*made, *(-one for one in made))
            first = SYNC_STREAM + number * context.sync_streams
            streams = {at: first + at for at in range(context.sync_streams)}
            yield Insertion(
                event=event,
                sizes=sizes,
                parts=parts,
                order=order,
                phase="sync",
                step=step,
                streams=streams,
            )
        if context.generation is not None:
            workspace = context.cublas_workspace_bytes if number == 0 else 0
            gathering = places.gathering if context.generation.gathers_like_step else None
            yield rollout(context.generation, event, step, workspace, gathering)


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

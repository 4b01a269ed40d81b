"""A trace through the allocator: what torch holds at the peak of every phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autotune.measurement import Phase
from autotune.predict.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from autotune.predict.streams import OnStreams
from autotune.trace import Part, Trace


@dataclass(frozen=True, kw_only=True)
class Held:
    """What torch holds at most while one phase of one step runs."""

    phase: Phase
    step: int
    requested_bytes: int
    """Most that was requested at one time."""

    allocated_bytes: int
    """Most that was handed out in blocks."""

    reserved_bytes: int
    """Most that was taken from the driver, cached blocks of earlier phases among it."""

    parts: Mapping[Part, int]
    """Requested bytes by part when most was allocated; sums to at most `requested_bytes`."""

    largest_bytes: int
    """The largest single request among them."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One trace through one allocator."""

    phases: tuple[Held, ...]
    """In the order in which they ran, each phase of each step once."""

    retries: int
    resting: Held | None = None
    """What is held right before the event that was asked about, after the cache was given back there if it was."""

    out_of_memory: OutOfMemory | None = None
    """Set where the device's room ended; what follows did not run."""

    @property
    def allocated_bytes(self) -> int:
        return max(held.allocated_bytes for held in self.phases)

    @property
    def reserved_bytes(self) -> int:
        return max(held.reserved_bytes for held in self.phases)

    @property
    def requested_bytes(self) -> int:
        return max(held.requested_bytes for held in self.phases)


class _Stretch:
    """The peaks of a phase while it is replayed."""

    def __init__(self, phase: Phase, step: int) -> None:
        self.phase, self.step = phase, step
        self.requested = self.allocated = self.reserved = 0
        self.peak_event = -1


def replay(
    trace: Trace,
    *,
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
    empty_cache_before: Collection[int] = (),
    resting_before: int | None = None,
) -> Replay:
    """Follow every event.

    `empty_cache_before` names the events, each the first of a stretch, before which the framework empties the cache;
    `resting_before` the one before which a look is taken at what is held.
    """
    allocator = _allocator(trace, settings, capacity_bytes)
    stretches: dict[tuple[Phase, int], _Stretch] = {}
    failure: OutOfMemory | None = None
    emptied, look = frozenset(empty_cache_before), _Stretch("optimizer", 0)
    for mark, span in trace.stretches():
        stretch = stretches.setdefault((mark.phase, mark.step), _Stretch(mark.phase, mark.step))
        if span.start in emptied:
            allocator.empty_cache()
        if span.start == resting_before:
            _note(look, allocator, span.start - 1)
        try:
            _follow(trace, span, allocator, stretch)
        except OutOfMemory as error:
            failure = error
            break
    if resting_before is not None and resting_before >= len(trace.events):
        _note(look, allocator, len(trace.events) - 1)
    live = _live_at(trace, {stretch.peak_event for stretch in (*stretches.values(), look)})
    held = tuple(_held(stretch, live[stretch.peak_event]) for stretch in stretches.values())
    resting = None if resting_before is None else _held(look, live[look.peak_event])
    return Replay(phases=held, retries=allocator.retries, resting=resting, out_of_memory=failure)


def _allocator(trace: Trace, settings: AllocatorSettings | None, capacity_bytes: int | None) -> CachingAllocator:
    if trace.streams or trace.returns:
        return OnStreams(trace, settings, capacity_bytes=capacity_bytes)
    return CachingAllocator(settings, capacity_bytes=capacity_bytes)


def _follow(trace: Trace, span: range, allocator: CachingAllocator, stretch: _Stretch) -> None:
    _note(stretch, allocator, span.start - 1)
    sizes, events = trace.sizes, trace.events
    malloc, free = allocator.malloc, allocator.free
    for at in span:
        entry = events[at]
        if entry < 0:
            free(-entry - 1)
            continue
        malloc(entry - 1, sizes[entry - 1])
        if allocator.allocated > stretch.allocated:
            stretch.allocated, stretch.peak_event = allocator.allocated, at
        if allocator.requested > stretch.requested:
            stretch.requested = allocator.requested
        if allocator.reserved > stretch.reserved:
            stretch.reserved = allocator.reserved


def _note(stretch: _Stretch, allocator: CachingAllocator, event: int) -> None:
    """What is held when it begins."""
    if allocator.allocated > stretch.allocated:
        stretch.allocated, stretch.peak_event = allocator.allocated, event
    stretch.requested = max(stretch.requested, allocator.requested)
    stretch.reserved = max(stretch.reserved, allocator.reserved)


@dataclass(frozen=True, kw_only=True)
class _Live:
    parts: Mapping[Part, int]
    largest_bytes: int


def _held(stretch: _Stretch, live: _Live) -> Held:
    return Held(
        phase=stretch.phase,
        step=stretch.step,
        requested_bytes=stretch.requested,
        allocated_bytes=stretch.allocated,
        reserved_bytes=stretch.reserved,
        parts=live.parts,
        largest_bytes=live.largest_bytes,
    )


def _live_at(trace: Trace, wanted: set[int]) -> dict[int, _Live]:
    """What is live right after each of these events, in one pass."""
    live: set[int] = set()
    found = {-1: _Live(parts={}, largest_bytes=0)}
    for at, entry in enumerate(trace.events):
        if entry > 0:
            live.add(entry - 1)
        else:
            live.discard(-entry - 1)
        if at in wanted:
            found[at] = _summed(trace, live)
    return found


def _summed(trace: Trace, live: set[int]) -> _Live:
    parts: Counter[Part] = Counter()
    for number in live:
        parts[trace.part_names[trace.parts[number]]] += trace.sizes[number]
    named = {part: parts[part] for part in trace.part_names if parts[part]}
    return _Live(parts=named, largest_bytes=max((trace.sizes[number] for number in live), default=0))

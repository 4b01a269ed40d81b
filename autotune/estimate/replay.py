"""Replay of a trace through the allocator: bytes that torch holds at the peak of every phase."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableSequence, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.core.measurement import Phase
from autotune.core.trace import Part, Trace
from autotune.estimate import allocator_compiled
from autotune.estimate.allocator import AllocatorSettings, CachingAllocator, OutOfMemory, StreamAllocator
from autotune.estimate.allocator_compiled import COUNTERS, NONE, RETRIES, EventArrays, Integers, ReplayPeaks


@dataclass(frozen=True, kw_only=True)
class PhaseUse:
    """Peak of one phase of one step."""

    phase: Phase
    step: int = 0
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int  # cached blocks of earlier phases included
    reserved_high_bytes: int  # the same after a first step of shorter sequences
    parts: Mapping[Part, int]  # requested bytes by part at the peak of `allocated_bytes`
    largest_bytes: int = 0  # the largest single request among them; 0: unknown


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Result of one trace through one allocator."""

    phases: tuple[PhaseUse, ...]  # in the order in which they ran, each phase of each step once
    retries: int
    resting: PhaseUse | None = None  # at the requested snapshot, after the cache was emptied there
    out_of_memory: OutOfMemory | None = None  # later events did not run

    @property
    def reserved_bytes(self) -> int:
        return max(held.reserved_bytes for held in self.phases)


def replay(
    trace: Trace,
    *,
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
    empty_cache_before: Collection[int] = (),
    resting_before: int | None = None,
) -> Replay:
    """Replay every event.

    `empty_cache_before`: events, each the first of a stretch, before which the framework empties
    the cache. `resting_before`: event before which the resting state is noted.
    """
    track = Track(trace, empty_cache_before=empty_cache_before, resting_before=resting_before)
    return track.replay(settings=settings, capacity_bytes=capacity_bytes)


class Track:
    """Events of a trace, ready to be replayed with any sizes."""

    def __init__(self, trace: Trace, *, empty_cache_before: Collection[int] = (), resting_before: int | None = None) -> None:
        self.trace = trace
        self.sizes = np.array(trace.sizes, dtype=np.int64)
        self._parts = np.array(trace.parts, dtype=np.int64)
        spans = [span for _, span in trace.stretches()]
        self._rows = list(dict.fromkeys((mark.phase, mark.step) for mark in trace.marks))
        places = {row: place for place, row in enumerate(self._rows)}
        self._has_snapshot, snapshot = resting_before is not None, NONE
        if resting_before is not None:
            snapshot = next((at for at, span in enumerate(spans) if span.start >= resting_before), len(spans))
        self.arrays = EventArrays(
            events=np.array(trace.events, dtype=np.int64),
            starts=np.array([*(span.start for span in spans), len(trace.events)], dtype=np.int64),
            rows=np.array([places[mark.phase, mark.step] for mark in trace.marks], dtype=np.int64),
            emptied=np.array([span.start in empty_cache_before for span in spans], dtype=np.int64),
            snapshot=snapshot,
            streams=_by_allocation(trace.streams, len(trace.sizes), 0),
            waits=_by_allocation(trace.returns, len(trace.sizes), NONE),
        )
        _require_sound(self.arrays, len(self._rows))
        # Events that make and free each allocation; one past the last where there is none.
        events = self.arrays.events
        self._made, self._freed = (np.full(len(self.sizes), len(events), dtype=np.int64) for _ in range(2))
        for times, sign in ((self._made, 1), (self._freed, -1)):
            at = np.flatnonzero(sign * events > 0)
            times[sign * events[at] - 1] = at

    def replay(
        self, sizes: Integers | None = None, *, settings: AllocatorSettings | None = None, capacity_bytes: int | None = None
    ) -> Replay:
        """Replay with the trace's own sizes, or with these."""
        sizes = self.sizes if sizes is None else sizes
        result, failure = self._run(sizes, settings, capacity_bytes)
        held = tuple(self._held(row, result.peaks[at], sizes) for at, row in enumerate(self._rows) if result.reached[at])
        resting = self._held(("optimizer", 0), result.peaks[-1], sizes) if self._has_snapshot else None
        return Replay(phases=held, retries=int(result.counters[RETRIES]), resting=resting, out_of_memory=failure)

    def reserved(self, sizes: Integers, *, settings: AllocatorSettings | None = None) -> Mapping[Phase, int]:
        """Return reserved bytes by phase alone: the parts take as long as the replay."""
        result, _ = self._run(sizes, settings, None)
        found: dict[Phase, int] = {}
        for at, (phase, _) in enumerate(self._rows):
            if result.reached[at]:
                found[phase] = max(int(result.peaks[at][2]), found.get(phase, 0))
        return found

    def _run(
        self, sizes: Integers, settings: AllocatorSettings | None, capacity_bytes: int | None
    ) -> tuple[ReplayPeaks, OutOfMemory | None]:
        if not allocator_compiled.available() or settings not in (None, AllocatorSettings()):
            return self._run_plain(sizes, settings, capacity_bytes)
        result = allocator_compiled.replay_events(self.arrays, sizes, len(self._rows), capacity_bytes)
        if result.completed:
            return result, None
        places = allocator_compiled.REFUSED, allocator_compiled.RESERVED, allocator_compiled.ALLOCATED
        request, reserved, allocated = (int(result.counters[at]) for at in places)
        return result, OutOfMemory(request_bytes=request, reserved_bytes=reserved, allocated_bytes=allocated)

    def _run_plain(
        self, sizes: Integers, settings: AllocatorSettings | None, capacity_bytes: int | None
    ) -> tuple[ReplayPeaks, OutOfMemory | None]:
        """Replay without numba, and with settings that the compiled form lacks."""
        if self.trace.streams or self.trace.returns:
            allocator: CachingAllocator = StreamAllocator(self.trace, settings, capacity_bytes=capacity_bytes)
        else:
            allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes)
        peaks = np.zeros((len(self._rows) + 1, 4), dtype=np.int64)
        peaks[:, 3] = NONE
        reached, failure = np.zeros(len(self._rows) + 1, dtype=np.int64), None
        try:
            self._run_events(allocator, sizes.tolist(), peaks, reached)
        except OutOfMemory as error:
            failure = error
        counters = np.zeros(len(COUNTERS), dtype=np.int64)
        counters[RETRIES] = allocator.retries
        return ReplayPeaks(peaks, reached, counters, failure is None), failure

    def _run_events(self, allocator: CachingAllocator, sizes: Sequence[int], peaks: Integers, reached: Integers) -> None:
        events, starts = self.arrays.events.tolist(), self.arrays.starts.tolist()
        for stretch, row in enumerate([*self.arrays.rows.tolist(), -1]):
            if row >= 0 and self.arrays.emptied[stretch]:
                allocator.empty_cache()
            if stretch == self.arrays.snapshot:
                _note(peaks[-1], allocator, starts[stretch] - 1)
            if row < 0:
                return
            reached[row] = 1
            top = peaks[row].tolist()
            try:
                _note(top, allocator, starts[stretch] - 1)
                for at in range(starts[stretch], starts[stretch + 1]):
                    entry = events[at]
                    if entry < 0:
                        allocator.free(-entry - 1)
                    else:
                        allocator.malloc(entry - 1, sizes[entry - 1])
                        _note(top, allocator, at)
            finally:
                peaks[row] = top

    def _held(self, row: tuple[Phase, int], peak: Integers, sizes: Integers) -> PhaseUse:
        requested, allocated, reserved, event = (int(one) for one in peak)
        live = np.flatnonzero((self._made <= event) & (self._freed > event))
        by_part = np.bincount(self._parts[live], weights=sizes[live], minlength=len(self.trace.part_names))
        return PhaseUse(
            phase=row[0],
            step=row[1],
            requested_bytes=requested,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            reserved_high_bytes=reserved,
            parts={part: int(size) for part, size in zip(self.trace.part_names, by_part, strict=True) if size},
            largest_bytes=int(sizes[live].max(initial=0)),
        )


def _require_sound(arrays: EventArrays, rows: int) -> None:
    """Raise IndexError for indices out of range: the compiled replay has no bounds checks."""
    count, numbers = len(arrays.streams), np.abs(arrays.events) - 1
    if (numbers < 0).any() or (numbers >= count).any() or len(arrays.waits) != count:
        raise IndexError("an event refers to no allocation")
    if len(np.unique(arrays.events)) < len(arrays.events):
        raise IndexError("an allocation is made twice or freed twice")
    if (arrays.streams < 0).any() or (arrays.waits < NONE).any():
        raise IndexError("an allocation has no stream or waits for a negative number")
    if not len(arrays.rows) == len(arrays.emptied) == len(arrays.starts) - 1:
        raise IndexError("stretches and rows differ in number")
    if (np.diff(arrays.starts, prepend=0, append=len(arrays.events)) < 0).any():
        raise IndexError("a stretch is outside the events")
    if (arrays.rows < 0).any() or (arrays.rows >= rows).any():
        raise IndexError("a stretch refers to no row")


def _by_allocation(given: Mapping[int, int], count: int, otherwise: int) -> Integers:
    found = np.full(count, otherwise, dtype=np.int64)
    for number, value in given.items():
        if number < count:
            found[number] = value
    return found


def _note(peak: MutableSequence[int] | Integers, allocator: CachingAllocator, event: int) -> None:
    """Raise the peaks to what is held after an event."""
    if allocator.allocated > peak[1]:
        peak[1], peak[3] = allocator.allocated, event
    peak[0] = max(peak[0], allocator.requested)
    peak[2] = max(peak[2], allocator.reserved)

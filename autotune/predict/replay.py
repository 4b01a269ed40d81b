"""A trace through the allocator: what torch holds at the peak of every phase."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableSequence, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.measurement import Phase
from autotune.predict import compiled, swift
from autotune.predict.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from autotune.predict.course import Course, Integers, Walked, require_sound
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
    track = Track(trace, empty_cache_before=empty_cache_before, resting_before=resting_before)
    return track.replay(settings=settings, capacity_bytes=capacity_bytes)


class Track:
    """A trace's events, ready to be replayed with whatever sizes."""

    def __init__(self, trace: Trace, *, empty_cache_before: Collection[int] = (), resting_before: int | None = None) -> None:
        self.trace = trace
        self.sizes = np.array(trace.sizes, dtype=np.int64)
        self._parts = np.array(trace.parts, dtype=np.int64)
        spans = [span for _, span in trace.stretches()]
        self._rows = list(dict.fromkeys((mark.phase, mark.step) for mark in trace.marks))
        places = {row: place for place, row in enumerate(self._rows)}
        emptied = frozenset(empty_cache_before)
        self._looks = resting_before is not None
        looked = -1 if resting_before is None else next(
            (at for at, span in enumerate(spans) if span.start >= resting_before), len(spans)
        )  # fmt: skip
        self.course = Course(
            events=np.array(trace.events, dtype=np.int64),
            starts=np.array([*(span.start for span in spans), len(trace.events)], dtype=np.int64),
            belongs=np.array([places[mark.phase, mark.step] for mark in trace.marks], dtype=np.int64),
            emptied=np.array([span.start in emptied for span in spans], dtype=np.int64),
            looked=looked,
            streams=_of_allocations(trace.streams, len(trace.sizes), 0),
            waits=_of_allocations(trace.returns, len(trace.sizes), -1),
        )
        require_sound(self.course, len(self._rows))
        self._made, self._gone = self._lives()

    def replay(
        self,
        sizes: Integers | None = None,
        *,
        settings: AllocatorSettings | None = None,
        capacity_bytes: int | None = None,
    ) -> Replay:
        """With the trace's own sizes, or with these."""
        sizes = self.sizes if sizes is None else sizes
        walked, failure = self._walked(sizes, settings, capacity_bytes)
        held = tuple(self._held(row, walked.peaks[at], sizes) for at, row in enumerate(self._rows) if walked.seen[at])
        look = self._held(("optimizer", 0), walked.peaks[-1], sizes) if self._looks else None
        return Replay(phases=held, retries=int(walked.books[swift.RETRIES]), resting=look, out_of_memory=failure)

    def reserved(
        self, sizes: Integers, *, settings: AllocatorSettings | None = None, capacity_bytes: int | None = None
    ) -> Mapping[Phase, int]:
        """Nothing but what is reserved at most in each phase: what lies in it takes as long to tell as to replay."""
        walked, _ = self._walked(sizes, settings, capacity_bytes)
        found: dict[Phase, int] = {}
        for at, (phase, _) in enumerate(self._rows):
            if walked.seen[at]:
                _, _, reserved, _ = walked.peaks[at]
                found[phase] = max(int(reserved), found.get(phase, 0))
        return found

    def _walked(
        self, sizes: Integers, settings: AllocatorSettings | None, capacity_bytes: int | None
    ) -> tuple[Walked, OutOfMemory | None]:
        if compiled.is_there() and settings in (None, AllocatorSettings()):
            return self._swiftly(sizes, capacity_bytes)
        return self._readably(sizes, settings, capacity_bytes)

    def _swiftly(self, sizes: Integers, capacity_bytes: int | None) -> tuple[Walked, OutOfMemory | None]:
        walked = swift.walk(self.course, sizes, len(self._rows), capacity_bytes)
        if walked.ran:
            return walked, None
        asked, reserved, allocated = (int(walked.books[at]) for at in (swift.ASKED, swift.RESERVED, swift.ALLOCATED))
        return walked, OutOfMemory(asked_bytes=asked, reserved_bytes=reserved, allocated_bytes=allocated)

    def _readably(
        self, sizes: Integers, settings: AllocatorSettings | None, capacity_bytes: int | None
    ) -> tuple[Walked, OutOfMemory | None]:
        """The same, step by step: for what the swift one does not know."""
        allocator = _allocator(self.trace, settings, capacity_bytes)
        peaks = np.zeros((len(self._rows) + 1, 4), dtype=np.int64)
        peaks[:, 3] = -1
        seen = np.zeros(len(self._rows) + 1, dtype=np.int64)
        failure: OutOfMemory | None = None
        try:
            self._follow(allocator, sizes.tolist(), peaks, seen)
        except OutOfMemory as error:
            failure = error
        books = np.zeros(swift.ASKED + 1, dtype=np.int64)
        books[swift.RETRIES] = allocator.retries
        return Walked(peaks, seen, books, failure is None), failure

    def _follow(self, allocator: CachingAllocator, sizes: Sequence[int], peaks: Integers, seen: Integers) -> None:
        events, starts = self.course.events.tolist(), self.course.starts.tolist()
        for stretch, row in enumerate([*self.course.belongs.tolist(), -1]):
            if row >= 0 and self.course.emptied[stretch]:
                allocator.empty_cache()
            if stretch == self.course.looked:
                _note(peaks[-1], allocator, starts[stretch] - 1)
            if row < 0:
                return
            seen[row] = 1
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

    def _lives(self) -> tuple[Integers, Integers]:
        """Of each allocation, the events that make it and give it back."""
        events = self.course.events
        made, gone = (np.full(len(self.sizes), len(events), dtype=np.int64) for _ in range(2))
        at = np.flatnonzero(events > 0)
        made[events[at] - 1] = at
        at = np.flatnonzero(events < 0)
        gone[-events[at] - 1] = at
        return made, gone

    def _held(self, row: tuple[Phase, int], peak: Integers, sizes: Integers) -> Held:
        requested, allocated, reserved, event = (int(one) for one in peak)
        live = np.flatnonzero((self._made <= event) & (self._gone > event))
        by_part = np.bincount(self._parts[live], weights=sizes[live], minlength=len(self.trace.part_names))
        return Held(
            phase=row[0],
            step=row[1],
            requested_bytes=requested,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            parts={part: int(size) for part, size in zip(self.trace.part_names, by_part, strict=True) if size},
            largest_bytes=int(sizes[live].max(initial=0)),
        )


def _of_allocations(given: Mapping[int, int], count: int, otherwise: int) -> Integers:
    found = np.full(count, otherwise, dtype=np.int64)
    for number, value in given.items():
        if number < count:
            found[number] = value
    return found


def _note(peak: MutableSequence[int] | Integers, allocator: CachingAllocator, event: int) -> None:
    """What is held after an event."""
    if allocator.allocated > peak[1]:
        peak[1], peak[3] = allocator.allocated, event
    peak[0] = max(peak[0], allocator.requested)
    peak[2] = max(peak[2], allocator.reserved)


def _allocator(trace: Trace, settings: AllocatorSettings | None, capacity_bytes: int | None) -> CachingAllocator:
    if trace.streams or trace.returns:
        return OnStreams(trace, settings, capacity_bytes=capacity_bytes)
    return CachingAllocator(settings, capacity_bytes=capacity_bytes)

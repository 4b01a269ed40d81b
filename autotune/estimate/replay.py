"""Replay of a trace through the allocator: bytes that torch holds at the peak of every phase.

A step in its context is replayed twice: as traced, and after a first step of shorter sequences,
whose cached blocks fit no later request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from autotune.core.measurement import Phase
from autotune.core.trace import Part, Trace
from autotune.estimate import allocator_compiled
from autotune.estimate.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from autotune.estimate.allocator_compiled import NONE, EventArrays, Integers, ReplayPeaks
from autotune.estimate.insertion import Insertion, inserted
from autotune.estimate.trace_context import (
    Places,
    TraceContext,
    emptied,
    insertions,
    loaded_once,
    places_in,
    second_cycle,
)

SHORTER_SHARE = 0.85
"""Length of the first step in the second replay, as a share of the longest: its cached blocks are
nearly large enough for later requests, and are not."""

BATCH_PARTS: frozenset[Part] = frozenset({"activations", "logits", "workspaces", "inputs"})
"""Parts whose size depends on the batch's length."""


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

    def without(self, parts: Collection[str]) -> PhaseUse:
        """Return the peak with these parts offloaded."""
        size = sum(held for part, held in self.parts.items() if part in parts)
        return replace(
            self,
            requested_bytes=self.requested_bytes - size,
            allocated_bytes=self.allocated_bytes - size,
            reserved_bytes=self.reserved_bytes - size,
            reserved_high_bytes=self.reserved_high_bytes - size,
            parts={part: held for part, held in self.parts.items() if part not in parts},
        )


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


@dataclass(frozen=True, kw_only=True)
class TraceUsage:
    """Peaks of one rank by phase."""

    phases: tuple[PhaseUse, ...]  # in the order of a cycle, each phase once; `load` first
    resting: (
        PhaseUse  # between two steps, before the next rollout: the state, and the cache left to it
    )
    loaded_bytes: (
        int  # reserved after loading, before the first step: found by an engine that starts
    )
    out_of_memory: Phase | None = None  # phase in which a limited memory ran out

    @property
    def reserved_bytes(self) -> int:
        return max(use.reserved_bytes for use in self.phases)


class StepStage:
    """Step in its context, ready to be replayed with its own or other sizes."""

    def __init__(self, trace: Trace, context: TraceContext) -> None:
        step = loaded_once(trace)
        self._places = places_in(step)
        added = _sorted_insertions(self._places, context)
        whole = inserted(step, added)
        self._context, self._key = context, _event_key(added, context)
        self._track = Track(
            whole,
            empty_cache_before=frozenset(emptied(whole, context)),
            resting_before=second_cycle(whole),
        )
        self._sizes = self._track.sizes
        # The first step's allocations whose size depends on the batch's length.
        shrinking = {index for index, part in enumerate(whole.part_names) if part in BATCH_PARTS}
        spans = [
            span for mark, span in whole.stretches() if mark.step == 0 and mark.phase != "load"
        ]
        made = [whole.events[at] - 1 for span in spans for at in span if whole.events[at] > 0]
        self._shrinking = np.array(
            [number for number in made if whole.parts[number] in shrinking], dtype=np.int64
        )
        self._cached: dict[int | None, TraceUsage] = {}

    def at(self, sizes: Integers, context: TraceContext) -> StepStage | None:
        """Return the same step with these sizes; None if the context has other events."""
        added = _sorted_insertions(self._places, context)
        if _event_key(added, context) != self._key:
            return None
        other = object.__new__(StepStage)
        other.__dict__.update(self.__dict__, _context=context, _cached={})
        other._sizes = np.concatenate(
            [sizes, *(np.array(one.sizes, dtype=np.int64) for one in added)]
        )
        return other

    def usage(self, capacity_bytes: int | None = None) -> TraceUsage:
        """Return peaks with unlimited memory, or with this much (then as traced alone)."""
        if capacity_bytes not in self._cached:
            if capacity_bytes is not None:
                found = _as_usage(self._replay(self._sizes, capacity_bytes), {})
            else:
                with ThreadPoolExecutor(
                    1
                ) as pool:  # a compiled replay holds no lock: the two run on two cores
                    later = pool.submit(
                        self._track.reserved, self._shorter_first(), settings=self._context.settings
                    )
                    found = _as_usage(self._replay(self._sizes, None), later.result())
            self._cached[capacity_bytes] = found
        return self._cached[capacity_bytes]

    def cannot_fit(self, capacity_bytes: int) -> bool:
        """Return True if the requests alone exceed the capacity: no replay is needed."""
        return capacity_bytes < max(use.requested_bytes for use in self.usage().phases)

    def fits(self, capacity_bytes: int) -> bool:
        """Return True if the steps run in this much memory, for either first length."""
        if capacity_bytes >= max(use.reserved_high_bytes for use in self.usage().phases):
            return True
        return not self.cannot_fit(capacity_bytes) and all(
            self._replay(sizes, capacity_bytes).out_of_memory is None
            for sizes in (self._sizes, self._shorter_first())
        )

    def _replay(self, sizes: Integers, capacity_bytes: int | None) -> Replay:
        return self._track.replay(
            sizes, settings=self._context.settings, capacity_bytes=capacity_bytes
        )

    def _shorter_first(self) -> Integers:
        sizes = self._sizes.copy()
        sizes[self._shrinking] = np.maximum(
            1, (sizes[self._shrinking] * SHORTER_SHARE).astype(np.int64)
        )
        return sizes


def _as_usage(plain: Replay, after_shorter: Mapping[Phase, int]) -> TraceUsage:
    """Return each phase's highest occurrence; of equals the latest."""
    by_phase: dict[Phase, list[PhaseUse]] = {}
    for held in plain.phases:
        by_phase.setdefault(held.phase, []).append(held)
    phases = []
    for phase, several in by_phase.items():
        top = max(reversed(several), key=lambda held: held.allocated_bytes)
        reserved = max(held.reserved_bytes for held in several)
        high = max(reserved, after_shorter.get(phase, 0))
        phases.append(replace(top, step=0, reserved_bytes=reserved, reserved_high_bytes=high))
    return TraceUsage(
        phases=tuple(phases),
        resting=plain.resting or replace(plain.phases[-1], step=0),
        loaded_bytes=by_phase["load"][0].reserved_bytes if "load" in by_phase else 0,
        out_of_memory=plain.phases[-1].phase if plain.out_of_memory is not None else None,
    )


def _sorted_insertions(places: Places, context: TraceContext) -> list[Insertion]:
    return sorted(insertions(places, context), key=lambda one: one.event)


def _event_key(added: Sequence[Insertion], context: TraceContext) -> tuple[object, ...]:
    """Return everything about the inserted events but their sizes."""
    orders = tuple((one.event, one.phase, tuple(one.order)) for one in added)
    return orders, context.empties_before_rollout, context.empty_cache_steps, context.settings


class Track:
    """Events of a trace, ready to be replayed with any sizes.

    `empty_cache_before`: events, each the first of a stretch, before which the framework empties
    the cache. `resting_before`: event before which the resting state is noted.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        empty_cache_before: Collection[int] = (),
        resting_before: int | None = None,
    ) -> None:
        self.trace = trace
        self.sizes = np.array(trace.sizes, dtype=np.int64)
        self._parts = np.array(trace.parts, dtype=np.int64)
        spans = [span for _, span in trace.stretches()]
        self._rows = list(dict.fromkeys((mark.phase, mark.step) for mark in trace.marks))
        places = {row: place for place, row in enumerate(self._rows)}
        self._has_snapshot, snapshot = resting_before is not None, NONE
        if resting_before is not None:
            snapshot = next(
                (at for at, span in enumerate(spans) if span.start >= resting_before), len(spans)
            )
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
        self._made, self._freed = (
            np.full(len(self.sizes), len(events), dtype=np.int64) for _ in range(2)
        )
        for times, sign in ((self._made, 1), (self._freed, -1)):
            at = np.flatnonzero(sign * events > 0)
            times[sign * events[at] - 1] = at

    def replay(
        self,
        sizes: Integers | None = None,
        *,
        settings: AllocatorSettings | None = None,
        capacity_bytes: int | None = None,
    ) -> Replay:
        """Replay with the trace's own sizes, or with these."""
        sizes = self.sizes if sizes is None else sizes
        result = self._run(sizes, settings, capacity_bytes)
        held = tuple(
            self._held(row, result.peaks[at], sizes)
            for at, row in enumerate(self._rows)
            if result.reached[at]
        )
        resting = (
            self._held(("optimizer", 0), result.peaks[-1], sizes) if self._has_snapshot else None
        )
        return Replay(
            phases=held, retries=result.retries, resting=resting, out_of_memory=result.out_of_memory
        )

    def reserved(
        self, sizes: Integers, *, settings: AllocatorSettings | None = None
    ) -> Mapping[Phase, int]:
        """Return reserved bytes by phase alone: the parts take as long as the replay."""
        result = self._run(sizes, settings, None)
        found: dict[Phase, int] = {}
        for at, (phase, _) in enumerate(self._rows):
            if result.reached[at]:
                found[phase] = max(int(result.peaks[at][2]), found.get(phase, 0))
        return found

    def _run(
        self, sizes: Integers, settings: AllocatorSettings | None, capacity_bytes: int | None
    ) -> ReplayPeaks:
        if allocator_compiled.available() and settings in (None, AllocatorSettings()):
            return allocator_compiled.replay_events(
                self.arrays, sizes, len(self._rows), capacity_bytes
            )
        # Without numba, and with settings that the compiled form lacks.
        streams, returns = self.trace.streams, self.trace.returns
        allocator = CachingAllocator(
            settings, capacity_bytes=capacity_bytes, streams=streams, returns=returns
        )
        peaks, reached = (
            np.zeros((len(self._rows) + 1, 4), dtype=np.int64),
            np.zeros(len(self._rows) + 1, dtype=np.int64),
        )
        peaks[:, 3] = NONE
        failure = None
        try:
            self._run_events(allocator, sizes.tolist(), peaks, reached)
        except OutOfMemory as error:
            failure = error
        return ReplayPeaks(peaks, reached, allocator.retries, failure)

    def _run_events(
        self, allocator: CachingAllocator, sizes: Sequence[int], peaks: Integers, reached: Integers
    ) -> None:
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
        by_part = np.bincount(
            self._parts[live], weights=sizes[live], minlength=len(self.trace.part_names)
        )
        return PhaseUse(
            phase=row[0],
            step=row[1],
            requested_bytes=requested,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            reserved_high_bytes=reserved,
            parts={
                part: int(size)
                for part, size in zip(self.trace.part_names, by_part, strict=True)
                if size
            },
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

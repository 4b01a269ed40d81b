"""Replay of a trace through the allocator: bytes that torch holds at the peak of every phase.

A step in its context is replayed twice: as traced, and after a first step of shorter sequences,
whose cached blocks fit no later request.

    trace + context -> StepStage -> Track -> replay -> TraceUsage
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from autotune.core.measurement import Phase
from autotune.core.trace import Part, Trace
from autotune.estimate.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from autotune.estimate.insertion import Insertion, inserted
from autotune.estimate.replay_arrays import (
    AT_EVENT,
    NONE,
    PEAK_ALLOCATED,
    PEAK_COLUMNS,
    PEAK_REQUESTED,
    PEAK_RESERVED,
    EventArrays,
    Integers,
    ReplayPeaks,
)
from autotune.estimate.step_in_context import (
    Places,
    emptied,
    insertions,
    loaded_once,
    places_in,
    second_cycle,
)
from autotune.estimate.trace_context import TraceContext

FEW_REPLAYS = 2  # those of one prediction: numba's import takes as long as five, of 47,000 events

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
        remaining = {part: size for part, size in self.parts.items() if part not in parts}
        offloaded = sum(self.parts.values()) - sum(remaining.values())
        return replace(
            self,
            requested_bytes=self.requested_bytes - offloaded,
            allocated_bytes=self.allocated_bytes - offloaded,
            reserved_bytes=self.reserved_bytes - offloaded,
            reserved_high_bytes=self.reserved_high_bytes - offloaded,
            parts=remaining,
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
        return max(use.reserved_bytes for use in self.phases)


@dataclass(frozen=True, kw_only=True)
class TraceUsage:
    """Peaks of one rank by phase."""

    phases: tuple[PhaseUse, ...]  # in the order of a cycle, each phase once; `load` first
    # Between two steps, before the next rollout: the state, and the cache left to it.
    resting: PhaseUse
    # Reserved after loading, before the first step: found by an engine that starts.
    loaded_bytes: int
    out_of_memory: Phase | None = None  # phase in which a limited memory ran out

    @property
    def reserved_bytes(self) -> int:
        return max(use.reserved_bytes for use in self.phases)


class StepStage:
    """Step in its context, ready to be replayed with its own or other sizes."""

    def __init__(self, trace: Trace, context: TraceContext) -> None:
        step = loaded_once(trace)
        self._context, self._places = context, places_in(step)
        added = _sorted_insertions(self._places, context)
        completed = inserted(step, added)
        self._event_key = _event_key(added, context)
        self._track = Track(
            completed,
            empty_cache_before=frozenset(emptied(completed, context)),
            resting_before=second_cycle(completed),
        )
        self._sizes = self._track.sizes
        self._batch_sized = _batch_sized_in_first_step(completed)
        self._usage: dict[int | None, TraceUsage] = {}  # by capacity
        self._replays: dict[int | None, ReplayPeaks] = {}  # as traced, by capacity

    def at(self, sizes: Integers, context: TraceContext) -> StepStage | None:
        """Return the same step with these sizes; None if the context has other events."""
        added = _sorted_insertions(self._places, context)
        if _event_key(added, context) != self._event_key:
            return None
        resized = copy.copy(self)
        resized._context = context
        resized._usage = {}
        resized._replays = {}
        added_sizes = [np.array(insertion.sizes, dtype=np.int64) for insertion in added]
        resized._sizes = np.concatenate([sizes, *added_sizes])
        return resized

    def usage(self, capacity_bytes: int | None = None) -> TraceUsage:
        """Return peaks with unlimited memory, or with this much (then as traced alone)."""
        if capacity_bytes not in self._usage:
            self._usage[capacity_bytes] = self._usage_within(capacity_bytes)
        return self._usage[capacity_bytes]

    def usage_as_traced(self) -> TraceUsage:
        """Return peaks with unlimited memory, without the second replay: `reserved_high_bytes` are
        `reserved_bytes`.
        """
        return self._track.usage(self._replay(None), self._sizes)

    @property
    def requested_bytes(self) -> int:
        """Peak of requested bytes, which any allocator needs: without a replay."""
        return self._track.requested_bytes(self._sizes)

    def fits(self, capacity_bytes: int) -> bool:
        """Return True if the steps run in this much memory, for either first length."""
        if capacity_bytes >= max(use.reserved_high_bytes for use in self.usage().phases):
            return True
        if not self.fits_as_traced(capacity_bytes):
            return False
        settings = self._context.settings
        shorter = self._track.run(self._shorter_first(), settings, capacity_bytes)
        return shorter.out_of_memory is None

    def fits_as_traced(self, capacity_bytes: int) -> bool:
        """Return True if the steps run in this much memory, the first at its own length."""
        if capacity_bytes < self.requested_bytes:
            return False
        return self._replay(capacity_bytes).out_of_memory is None

    def _usage_within(self, capacity_bytes: int | None) -> TraceUsage:
        if capacity_bytes is not None:
            return self._track.usage(self._replay(capacity_bytes), self._sizes)
        # A compiled replay holds no lock: the two run on two cores.
        settings = self._context.settings
        with ThreadPoolExecutor(1) as pool:  # of its own: threads do not survive a fork
            shorter = pool.submit(self._track.reserved, self._shorter_first(), settings=settings)
            as_traced = self._replay(None)
            return self._track.usage(as_traced, self._sizes, shorter.result())

    def _replay(self, capacity_bytes: int | None) -> ReplayPeaks:
        if capacity_bytes not in self._replays:
            settings = self._context.settings
            self._replays[capacity_bytes] = self._track.run(self._sizes, settings, capacity_bytes)
        return self._replays[capacity_bytes]

    def _shorter_first(self) -> Integers:
        """Return the sizes with a first step of shorter sequences."""
        sizes = self._sizes.copy()
        shorter = (sizes[self._batch_sized] * SHORTER_SHARE).astype(np.int64)
        sizes[self._batch_sized] = np.maximum(1, shorter)
        return sizes


def _batch_sized_in_first_step(trace: Trace) -> Integers:
    """Return the first step's allocations whose size depends on the batch's length."""
    numbers = []
    for mark, span in trace.stretches():
        if mark.step != 0 or mark.phase == "load":
            continue
        for entry in trace.events[span.start : span.stop]:
            if entry > 0 and trace.part_names[trace.parts[entry - 1]] in BATCH_PARTS:
                numbers.append(entry - 1)
    return np.array(numbers, dtype=np.int64)


def _sorted_insertions(places: Places, context: TraceContext) -> list[Insertion]:
    return sorted(insertions(places, context), key=lambda insertion: insertion.event)


def _event_key(added: Sequence[Insertion], context: TraceContext) -> tuple[object, ...]:
    """Return everything about the inserted events but their sizes."""
    orders = []
    for insertion in added:
        orders.append((insertion.event, insertion.phase, tuple(insertion.order)))
    emptied_at = context.empties_before_rollout, context.empty_cache_steps
    return tuple(orders), emptied_at, context.settings


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
        self._rows = list(dict.fromkeys((mark.phase, mark.step) for mark in trace.marks))
        self._has_snapshot = resting_before is not None
        starts = [span.start for _, span in trace.stretches()]
        rows = [self._rows.index((mark.phase, mark.step)) for mark in trace.marks]
        self.arrays = EventArrays(
            events=np.array(trace.events, dtype=np.int64),
            starts=np.array([*starts, len(trace.events)], dtype=np.int64),
            rows=np.array(rows, dtype=np.int64),
            emptied=np.isin(starts, list(empty_cache_before)).astype(np.int64),
            snapshot=_stretch_of_snapshot(starts, resting_before),
            streams=_by_allocation(trace.streams, len(trace.sizes), 0),
            waits=_by_allocation(trace.returns, len(trace.sizes), NONE),
        )
        _require_sound(self.arrays, len(self._rows))
        self._made_at, self._freed_at = _lifetimes(self.arrays.events, len(self.sizes))

    def replay(
        self,
        sizes: Integers | None = None,
        *,
        settings: AllocatorSettings | None = None,
        capacity_bytes: int | None = None,
    ) -> Replay:
        """Replay with the trace's own sizes, or with these."""
        sizes = self.sizes if sizes is None else sizes
        result = self.run(sizes, settings, capacity_bytes)
        phases = []
        for number, (phase, step) in enumerate(self._rows):
            if result.reached[number]:
                phases.append(self._phase_use(phase, step, result.peaks[number], sizes))
        return Replay(
            phases=tuple(phases),
            retries=result.retries,
            resting=self._resting(result, sizes),
            out_of_memory=result.out_of_memory,
        )

    def usage(
        self,
        result: ReplayPeaks,
        sizes: Integers,
        after_shorter: Mapping[Phase, int] = MappingProxyType({}),
    ) -> TraceUsage:
        """Return each phase's highest occurrence; of equals the latest. `after_shorter`: reserved
        bytes by phase after a first step of shorter sequences.
        """
        # 1. The rows of each phase that ran.
        rows_by_phase: dict[Phase, list[int]] = {}
        last_phase, last_row = self._rows[0][0], 0
        for row, (phase, _) in enumerate(self._rows):
            if result.reached[row]:
                rows_by_phase.setdefault(phase, []).append(row)
                last_phase, last_row = phase, row

        # 2. The highest of them. Only its parts are summed: they take as long as the replay.
        allocated = result.peaks[:, PEAK_ALLOCATED].tolist()
        reserved = result.peaks[:, PEAK_RESERVED].tolist()
        phases = []
        for phase, rows in rows_by_phase.items():
            highest = max(reversed(rows), key=allocated.__getitem__)
            use = self._phase_use(phase, 0, result.peaks[highest], sizes)
            reserved_bytes = max(reserved[row] for row in rows)
            high_bytes = max(reserved_bytes, after_shorter.get(phase, 0))
            phases.append(
                replace(use, reserved_bytes=reserved_bytes, reserved_high_bytes=high_bytes)
            )

        # 3. The state between two steps.
        loading = rows_by_phase.get("load")
        resting = self._resting(result, sizes)
        if resting is None:
            resting = self._phase_use(last_phase, 0, result.peaks[last_row], sizes)
        return TraceUsage(
            phases=tuple(phases),
            resting=resting,
            loaded_bytes=reserved[loading[0]] if loading else 0,
            out_of_memory=None if result.out_of_memory is None else last_phase,
        )

    def _resting(self, result: ReplayPeaks, sizes: Integers) -> PhaseUse | None:
        """Return the requested snapshot."""
        if not self._has_snapshot:
            return None
        return self._phase_use("optimizer", 0, result.peaks[-1], sizes)

    def reserved(
        self, sizes: Integers, *, settings: AllocatorSettings | None = None
    ) -> Mapping[Phase, int]:
        """Return reserved bytes by phase alone: the parts take as long as the replay."""
        result = self.run(sizes, settings, None)
        reserved: dict[Phase, int] = {}
        for number, (phase, _) in enumerate(self._rows):
            if result.reached[number]:
                size = int(result.peaks[number][PEAK_RESERVED])
                reserved[phase] = max(size, reserved.get(phase, 0))
        return reserved

    def requested_bytes(self, sizes: Integers) -> int:
        """Return the peak of requested bytes, without a replay."""
        numbers = np.abs(self.arrays.events) - 1
        changes = np.sign(self.arrays.events) * sizes[numbers]
        return int(np.cumsum(changes).max(initial=0))

    def run(
        self,
        sizes: Integers,
        settings: AllocatorSettings | None,
        capacity_bytes: int | None,
    ) -> ReplayPeaks:
        """Replay with these sizes; return the peaks of every row."""
        rows = len(self._rows)
        if settings in (None, AllocatorSettings()):
            replay_events = _compiled_replay()
            if replay_events is not None:
                return replay_events(self.arrays, sizes, rows, capacity_bytes)
        # Without numba, with settings that the compiled form lacks, and for the first replays.
        allocator = CachingAllocator(
            settings,
            capacity_bytes=capacity_bytes,
            streams=self.trace.streams,
            returns=self.trace.returns,
        )
        peaks = np.zeros((rows + 1, PEAK_COLUMNS), dtype=np.int64)
        peaks[:, AT_EVENT] = NONE
        reached = np.zeros(rows + 1, dtype=np.int64)
        failure = None
        try:
            self._run_events(allocator, sizes.tolist(), peaks, reached)
        except OutOfMemory as error:
            failure = error
        return ReplayPeaks(peaks, reached, allocator.retries, failure)

    def _run_events(
        self,
        allocator: CachingAllocator,
        sizes: Sequence[int],
        peaks: Integers,
        reached: Integers,
    ) -> None:
        events = self.arrays.events.tolist()
        starts = self.arrays.starts.tolist()
        end = NONE  # row of the stretch after the last one
        for stretch, row in enumerate([*self.arrays.rows.tolist(), end]):
            if row != end and self.arrays.emptied[stretch]:
                allocator.empty_cache()
            if stretch == self.arrays.snapshot:
                _note(peaks[-1], allocator, starts[stretch] - 1)
            if row == end:
                return
            reached[row] = 1
            peak = peaks[row].tolist()
            try:
                _note(peak, allocator, starts[stretch] - 1)
                for at in range(starts[stretch], starts[stretch + 1]):
                    entry = events[at]
                    if entry < 0:
                        allocator.free(-entry - 1)
                    else:
                        allocator.malloc(entry - 1, sizes[entry - 1])
                        _note(peak, allocator, at)
            finally:
                peaks[row] = peak

    def _phase_use(
        self,
        phase: Phase,
        step: int,
        peak: Integers,
        sizes: Integers,
    ) -> PhaseUse:
        event = int(peak[AT_EVENT])
        reserved = int(peak[PEAK_RESERVED])
        live = np.flatnonzero((self._made_at <= event) & (self._freed_at > event))
        part_names = self.trace.part_names
        by_part = np.bincount(self._parts[live], weights=sizes[live], minlength=len(part_names))
        parts = {}
        for part, size in zip(part_names, by_part, strict=True):
            if size:
                parts[part] = int(size)
        return PhaseUse(
            phase=phase,
            step=step,
            requested_bytes=int(peak[PEAK_REQUESTED]),
            allocated_bytes=int(peak[PEAK_ALLOCATED]),
            reserved_bytes=reserved,
            reserved_high_bytes=reserved,
            parts=parts,
            largest_bytes=int(sizes[live].max(initial=0)),
        )


_replays = itertools.count()


def _compiled_replay() -> Callable[..., ReplayPeaks] | None:
    """Return the compiled form. None: it is not installed, or loading it would take longer than the
    few replays of a single prediction.
    """
    if next(_replays) < FEW_REPLAYS:
        return None
    from autotune.estimate import allocator_compiled

    return allocator_compiled.replay_events if allocator_compiled.available() else None


def _stretch_of_snapshot(starts: Sequence[int], resting_before: int | None) -> int:
    """Return the stretch before which the resting state is noted; one past the last for the end."""
    if resting_before is None:
        return NONE
    for stretch, start in enumerate(starts):
        if start >= resting_before:
            return stretch
    return len(starts)


def _lifetimes(events: Integers, count: int) -> tuple[Integers, Integers]:
    """Return the events that make and free each allocation; one past the last where there is
    none.
    """
    made_at = np.full(count, len(events), dtype=np.int64)
    freed_at = made_at.copy()
    mallocs = np.flatnonzero(events > 0)
    frees = np.flatnonzero(events < 0)
    made_at[events[mallocs] - 1] = mallocs
    freed_at[-events[frees] - 1] = frees
    return made_at, freed_at


def _require_sound(arrays: EventArrays, rows: int) -> None:
    """Raise IndexError for indices out of range: the compiled replay has no bounds checks."""
    count = len(arrays.streams)
    numbers = np.abs(arrays.events) - 1
    if (numbers < 0).any() or (numbers >= count).any() or len(arrays.waits) != count:
        raise IndexError("an event refers to no allocation")
    in_order = np.sort(arrays.events)
    if (in_order[1:] == in_order[:-1]).any():
        raise IndexError("an allocation is made twice or freed twice")
    if (arrays.streams < 0).any() or (arrays.waits < NONE).any():
        raise IndexError("an allocation has no stream or waits for a negative number")
    if not len(arrays.rows) == len(arrays.emptied) == len(arrays.starts) - 1:
        raise IndexError("stretches and rows differ in number")
    if (np.diff(arrays.starts, prepend=0, append=len(arrays.events)) < 0).any():
        raise IndexError("a stretch is outside the events")
    if (arrays.rows < 0).any() or (arrays.rows >= rows).any():
        raise IndexError("a stretch refers to no row")


def _by_allocation(
    values: Mapping[int, int],
    count: int,
    default: int,
) -> Integers:
    by_allocation = np.full(count, default, dtype=np.int64)
    for number, value in values.items():
        if number < count:
            by_allocation[number] = value
    return by_allocation


def _note(
    peak: MutableSequence[int] | Integers,
    allocator: CachingAllocator,
    event: int,
) -> None:
    """Raise the peaks to what is held after an event."""
    if allocator.allocated > peak[PEAK_ALLOCATED]:
        peak[PEAK_ALLOCATED] = allocator.allocated
        peak[AT_EVENT] = event
    if allocator.requested > peak[PEAK_REQUESTED]:
        peak[PEAK_REQUESTED] = allocator.requested
    if allocator.reserved > peak[PEAK_RESERVED]:
        peak[PEAK_RESERVED] = allocator.reserved

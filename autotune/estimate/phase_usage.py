"""Memory of a trace, reduced to a few integers per phase for the timeline.

Allocations outside the traced step are inserted first. Then the allocator is replayed twice: as
traced, and after a first step of shorter sequences, whose cached blocks fit no later request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from autotune.core.measurement import Phase
from autotune.core.trace import Part, Trace
from autotune.estimate.event_arrays import Integers
from autotune.estimate.insertion import Insertion, inserted
from autotune.estimate.replay import PhaseUse, Replay, Track
from autotune.estimate.trace_context import TraceContext, emptied, insertions, loaded_once, places_in, second_cycle

SHORTER_SHARE = 0.85
"""Length of the first step in the second replay, as a share of the longest: its cached blocks are
nearly large enough for later requests, and are not."""

BATCH_PARTS: frozenset[Part] = frozenset({"activations", "logits", "workspaces", "inputs"})
"""Parts whose size depends on the batch's length."""


@dataclass(frozen=True, kw_only=True)
class TraceUsage:
    """Peaks of one rank by phase."""

    phases: tuple[PhaseUse, ...]  # in the order of a cycle, each phase once; `load` first
    resting: PhaseUse  # between two steps, before the next rollout: the state, and the cache left to it
    loaded_bytes: int  # reserved after loading, before the first step: found by an engine that starts
    retries: int = 0  # cache flushes for want of room
    out_of_memory: Phase | None = None  # phase in which a limited memory ran out

    @property
    def allocated_bytes(self) -> int:
        return max(use.allocated_bytes for use in self.phases)

    @property
    def reserved_bytes(self) -> int:
        return max(use.reserved_bytes for use in self.phases)

    @property
    def reserved_high_bytes(self) -> int:
        return max(use.reserved_high_bytes for use in self.phases)


def usage(trace: Trace, context: TraceContext | None = None, *, capacity_bytes: int | None = None) -> TraceUsage:
    """Replay the trace in its context."""
    return StepStage(trace, context or TraceContext()).usage(capacity_bytes)


class StepStage:
    """Step in its context, ready to be replayed with its own or other sizes."""

    def __init__(self, trace: Trace, context: TraceContext) -> None:
        step = loaded_once(trace)
        self._places = places_in(step)
        added = _sorted_insertions(insertions(self._places, context))
        whole = inserted(step, added)
        self._context, self._key = context, _event_key(added, context)
        self._track = Track(whole, empty_cache_before=frozenset(emptied(whole, context)), resting_before=second_cycle(whole))
        self._sizes = self._track.sizes
        self._shrinking = _first_batches(whole)
        self._cached: dict[int | None, TraceUsage] = {}

    def at(self, sizes: Integers, context: TraceContext) -> StepStage | None:
        """Return the same step with these sizes; None if the context has other events."""
        added = _sorted_insertions(insertions(self._places, context))
        if _event_key(added, context) != self._key:
            return None
        other = object.__new__(StepStage)
        other.__dict__.update(self.__dict__, _context=context, _cached={})
        other._sizes = np.concatenate([sizes, *(np.array(one.sizes, dtype=np.int64) for one in added)])
        return other

    def usage(self, capacity_bytes: int | None = None) -> TraceUsage:
        """Return peaks with unlimited memory, or with this much (then as traced alone)."""
        if capacity_bytes not in self._cached:
            self._cached[capacity_bytes] = self._usage(capacity_bytes)
        return self._cached[capacity_bytes]

    def cannot_fit(self, capacity_bytes: int) -> bool:
        """Return True if the requests alone exceed the capacity: no replay is needed."""
        return capacity_bytes < max(use.requested_bytes for use in self.usage().phases)

    def fits(self, capacity_bytes: int) -> bool:
        """Return True if the steps run in this much memory, for either first length."""
        if capacity_bytes >= self.usage().reserved_high_bytes:
            return True
        return not self.cannot_fit(capacity_bytes) and all(
            self._replay(sizes, capacity_bytes).out_of_memory is None for sizes in (self._sizes, self._shorter_first())
        )

    def _usage(self, capacity_bytes: int | None) -> TraceUsage:
        if capacity_bytes is not None:
            return _as_usage(self._replay(self._sizes, capacity_bytes), {})
        with ThreadPoolExecutor(1) as pool:  # a compiled replay holds no lock: the two run on two cores
            later = pool.submit(self._track.reserved, self._shorter_first(), settings=self._context.settings)
            return _as_usage(self._replay(self._sizes, None), later.result())

    def _replay(self, sizes: Integers, capacity_bytes: int | None) -> Replay:
        return self._track.replay(sizes, settings=self._context.settings, capacity_bytes=capacity_bytes)

    def _shorter_first(self) -> Integers:
        sizes = self._sizes.copy()
        sizes[self._shrinking] = np.maximum(1, (sizes[self._shrinking] * SHORTER_SHARE).astype(np.int64))
        return sizes


def without(usage: TraceUsage, phase: Phase, part: Part) -> TraceUsage:
    """Return the peaks with a part of the state offloaded in one phase."""

    def reduced(use: PhaseUse) -> PhaseUse:
        size = use.parts.get(part, 0)
        return replace(
            use,
            requested_bytes=use.requested_bytes - size,
            allocated_bytes=use.allocated_bytes - size,
            reserved_bytes=use.reserved_bytes - size,
            reserved_high_bytes=use.reserved_high_bytes - size,
            parts={name: held for name, held in use.parts.items() if name != part},
        )

    return replace(usage, phases=tuple(reduced(use) if use.phase == phase else use for use in usage.phases))


def _as_usage(plain: Replay, after_shorter: Mapping[Phase, int]) -> TraceUsage:
    return TraceUsage(
        phases=tuple(_by_phase(plain, after_shorter)),
        resting=plain.resting or replace(plain.phases[-1], step=0),
        loaded_bytes=next((held.reserved_bytes for held in plain.phases if held.phase == "load"), 0),
        retries=plain.retries,
        out_of_memory=plain.phases[-1].phase if plain.out_of_memory is not None else None,
    )


def _sorted_insertions(added: Iterator[Insertion]) -> list[Insertion]:
    return sorted(added, key=lambda one: one.event)


def _event_key(added: Sequence[Insertion], context: TraceContext) -> tuple[object, ...]:
    """Return everything about the inserted events but their sizes."""
    orders = tuple((one.event, one.phase, tuple(one.order)) for one in added)
    return orders, context.empties_before_rollout, context.empty_cache_steps, context.settings


def _first_batches(trace: Trace) -> Integers:
    """Return the first step's allocations whose size depends on the batch's length."""
    shrinking = {index for index, part in enumerate(trace.part_names) if part in BATCH_PARTS}
    spans = [span for mark, span in trace.stretches() if mark.step == 0 and mark.phase != "load"]
    made = [trace.events[at] - 1 for span in spans for at in span if trace.events[at] > 0]
    return np.array([number for number in made if trace.parts[number] in shrinking], dtype=np.int64)


def _by_phase(plain: Replay, after_shorter: Mapping[Phase, int]) -> Iterator[PhaseUse]:
    """Yield each phase's highest occurrence; of equals the latest."""
    order: dict[Phase, list[PhaseUse]] = {}
    for held in plain.phases:
        order.setdefault(held.phase, []).append(held)
    for phase, several in order.items():
        top = max(reversed(several), key=lambda held: held.allocated_bytes)
        reserved = max(held.reserved_bytes for held in several)
        high = max(reserved, after_shorter.get(phase, 0))
        yield replace(top, step=0, reserved_bytes=reserved, reserved_high_bytes=high)

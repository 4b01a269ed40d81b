"""Puts into a trace what the step itself does not show: allocations of libraries, and whole stretches such as a rollout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.measurement import Phase
from autotune.trace import Mark, Part, Trace


@dataclass(frozen=True, kw_only=True)
class Insertion:
    """Allocations that happen right before an event of the trace."""

    event: int
    sizes: Sequence[int]
    parts: Sequence[Part]
    """What each of them is."""

    order: Sequence[int]
    """Its own events, as a trace writes them: n+1 makes allocation n of this insertion, -(n+1) gives it back."""

    phase: Phase | None = None
    """The phase that they are; None leaves the one that runs there."""

    step: int = 0


def inserted(trace: Trace, insertions: Iterable[Insertion]) -> Trace:
    """The trace with these in it, in the order of their events."""
    sizes, parts = list(trace.sizes), list(trace.parts)
    names = list(trace.part_names)
    events: list[int] = []
    marks: list[Mark] = []
    pending, done = list(trace.marks), 0
    for insertion in sorted(insertions, key=lambda one: one.event):
        done, pending = _copy(trace, done, insertion.event, events, marks, pending)
        first = len(sizes)
        sizes += insertion.sizes
        for part in insertion.parts:
            if part not in names:
                names.append(part)
            parts.append(names.index(part))
        if insertion.phase is not None:
            marks.append(Mark(event=len(events), phase=insertion.phase, step=insertion.step))
        events += [entry + first if entry > 0 else entry - first for entry in insertion.order]
        if insertion.phase is not None and not (pending and pending[0].event == insertion.event):
            marks += [dataclasses.replace(_running(trace, insertion.event), event=len(events))]
    _copy(trace, done, len(trace.events), events, marks, pending)
    return dataclasses.replace(
        trace, sizes=tuple(sizes), parts=tuple(parts), part_names=tuple(names), events=tuple(events), marks=_tidy(marks)
    )


def _copy(
    trace: Trace, start: int, end: int, events: list[int], marks: list[Mark], pending: list[Mark]
) -> tuple[int, list[Mark]]:
    """The trace's own events from `start` to `end`, with the marks that stand before `end`."""
    offset = len(events) - start
    last = end == len(trace.events)
    while pending and (pending[0].event < end or last):
        marks.append(dataclasses.replace(pending[0], event=pending[0].event + offset))
        pending = pending[1:]
    events += trace.events[start:end]
    return end, pending


def _running(trace: Trace, event: int) -> Mark:
    return next(mark for mark in reversed(trace.marks) if mark.event <= event)


def _tidy(marks: list[Mark]) -> tuple[Mark, ...]:
    """Of marks at one event the last counts."""
    by_event = {mark.event: mark for mark in marks}
    return tuple(by_event[event] for event in sorted(by_event))

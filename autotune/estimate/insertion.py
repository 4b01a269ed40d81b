"""Allocations inserted into a traced step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotune.core.measurement import Phase
from autotune.core.trace import Mark, Part, Trace


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

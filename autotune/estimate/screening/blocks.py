"""Points, samples, and traces cut into blocks: the events of one layer in one pass, or those
between layers.

The middle layers of a model repeat each other, so the blocks of a long model are those of a short
one with the group of its middle layers repeated. This is checked, block by block, on two lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from autotune.core.measurement import Phase
from autotune.core.trace import Mark, ModuleUse, Part, Trace

PARTS: tuple[Part, ...] = get_args(Part)

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class NotUniform(Exception):
    """The model's layers do not repeat each other; the text names the difference."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The settings in which candidates of one family differ."""

    micro_batch: int
    prompt: int
    completion: int
    micro_steps: int
    """Micro-batches per generation (without generation, per optimizer step)."""

    @property
    def row(self) -> tuple[int, int, int, int]:
        return self.micro_batch, self.prompt, self.completion, self.micro_steps


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A trace and its point."""

    point: Point
    trace: Trace


def rows_of(points: Sequence[Point]) -> Floats:
    return np.array([point.row for point in points], dtype=np.float64)


class BlockKey(NamedTuple):
    """Identity of a block, independent of model length and batch size."""

    phase: Phase
    step: int
    run: int
    """Number of the stay in this phase within the step."""

    layer: int | None
    """The running layer; None between layers."""

    after: int | None
    """The last layer that ran in this stay; None before the first."""

    occurrence: int
    """Number among blocks with equal values above: passes in one stay repeat the layers."""

    @property
    def stay(self) -> tuple[Phase, int, int]:
        return self.phase, self.step, self.run

    @property
    def last_layer(self) -> int | None:
        """The running layer, or the last one before."""
        return self.layer if self.layer is not None else self.after


@dataclass(frozen=True, kw_only=True)
class BlockSpan:
    """Range of a block in the ordered events of a trace."""

    key: BlockKey
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class TraceBlock:
    """Events of one block."""

    key: BlockKey
    numbers: Integers
    """The allocation that each event makes or frees."""

    deltas: Integers
    """Bytes allocated (or, negative, freed) by each event."""

    parts: Integers
    """Index in PARTS of each event's allocation."""


def spans_of(trace: Trace) -> tuple[list[int], list[BlockSpan]]:
    """Return the events in a deterministic order, and all blocks with events."""
    events = np.array(trace.events, dtype=np.int64)
    spans = list(_spans(trace))
    uses = [use[0] for use in trace.usage.uses if use[0] < len(events)] if trace.usage else []
    # Frees between two allocations are simultaneous, in arbitrary order: sort them by number.
    begins = np.append(True, (events[1:] > 0) != (events[:-1] > 0))
    begins[np.array([*(span.start for span in spans), *uses], dtype=np.int64)] = True
    ordered: list[int] = events[np.lexsort((np.abs(events), np.cumsum(begins)))].tolist()
    return ordered, spans


def blocks_of(trace: Trace) -> tuple[TraceBlock, ...]:
    """Return all blocks in order."""
    ordered, spans = spans_of(trace)
    sizes, events = np.array(trace.sizes, dtype=np.int64), np.array(ordered, dtype=np.int64)
    names = np.array([PARTS.index(name) for name in trace.part_names], dtype=np.int64)
    numbers = np.abs(events) - 1
    deltas = np.sign(events) * sizes[numbers]
    parts = names[np.array(trace.parts, dtype=np.int64)][numbers]
    return tuple(
        TraceBlock(key=one.key, numbers=numbers[span], deltas=deltas[span], parts=parts[span])
        for one in spans
        for span in (slice(one.start, one.stop),)
    )


def _spans(trace: Trace) -> Iterator[BlockSpan]:
    """Yield the blocks; neighbours between the same layers are merged."""
    runs: Counter[tuple[Phase, int]] = Counter()
    seen: Counter[tuple[object, ...]] = Counter()
    merged: list[tuple[tuple[Phase, int, int, int | None, int | None], int, int]] = []
    stay: tuple[Phase, int] | None = None
    after: int | None = None
    for mark, span in trace.stretches():
        if not len(span):
            continue
        if (mark.phase, mark.step) != stay:
            stay, after = (mark.phase, mark.step), None
            runs[stay] += 1
        after = mark.layer if mark.layer is not None else after
        key = (mark.phase, mark.step, runs[stay], mark.layer, after)
        if merged and merged[-1][0] == key and merged[-1][2] == span.start and mark.layer is None:
            merged[-1] = (key, merged[-1][1], span.stop)
        else:
            merged.append((key, span.start, span.stop))
    for key, start, stop in merged:
        yield BlockSpan(key=BlockKey(*key, seen[key]), start=start, stop=stop)
        seen[key] += 1


class BlockedTrace:
    """A trace in blocks, with the marks and module uses of each block."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events, self.spans = spans_of(trace)
        self.keys = [span.key for span in self.spans]
        self.origin = [(0, 0)] * len(trace.sizes)
        """Block and offset of the event that makes each allocation."""
        for number, span in enumerate(self.spans):
            for offset, entry in enumerate(self.events_of(span)):
                if entry > 0:
                    self.origin[entry - 1] = (number, offset)
        self.marks = self._marks_by_block(trace.marks)
        self.uses = self._uses_by_block(trace.usage)

    def events_of(self, span: BlockSpan) -> list[int]:
        return self.events[span.start : span.stop]

    def size_and_part(self, entry: int) -> tuple[int, int]:
        return self.trace.sizes[abs(entry) - 1], self.trace.parts[abs(entry) - 1]

    def _marks_by_block(self, marks: Sequence[Mark]) -> list[list[tuple[int, Mark]]]:
        """Return each block's marks with their offsets."""
        found: list[list[tuple[int, Mark]]] = [[] for _ in self.spans]
        block = 0
        for mark in marks:
            while block + 1 < len(self.spans) and mark.event >= self.spans[block].stop:
                block += 1
            found[block].append((mark.event - self.spans[block].start, mark))
        return found

    def _uses_by_block(self, usage: ModuleUse | None) -> list[list[tuple[int, ...]]]:
        """Return each block's uses with offsets; ends belong to the block before, begins to the
        next."""
        found: list[list[tuple[int, ...]]] = [[] for _ in self.spans]
        block = 0
        for use in usage.uses if usage else ():
            ends = use[1] in (2, 4, 5)
            stop = self.spans[block].stop
            while block + 1 < len(self.spans) and (use[0] > stop or (use[0] == stop and not ends)):
                block += 1
                stop = self.spans[block].stop
            found[block].append((use[0] - self.spans[block].start, *use[1:]))
        return found

"""Traces cut into blocks: the events of one layer in one pass, or those between layers.

Blocks are what two traces have in common. At two points of a family they have the same keys; in
models of two lengths, those of the longer one are the shorter one's with a group repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np

from autotune.core.measurement import Phase
from autotune.core.trace import Mark, Part, Trace
from autotune.estimate.screening.points import Integers
from autotune.estimate.sharding.module_uses import ENDINGS

PARTS: tuple[Part, ...] = get_args(Part)

Use = tuple[int, ...]  # an entry of `ModuleUse.uses`: event, kind, index, and perhaps an allocation


class Stay(NamedTuple):
    """An uninterrupted stay of the step in one phase."""

    phase: Phase
    step: int
    run: int  # number of the stay in this phase within the step


class BlockKey(NamedTuple):
    """Identity of a block, independent of model length and batch size."""

    stay: Stay
    layer: int | None  # the running layer; None between layers
    after: int | None  # the last layer that ran in this stay; None before the first
    occurrence: int  # number among equal blocks: several passes in one stay repeat the layers

    @property
    def last_layer(self) -> int | None:
        """The running layer, or the last one before."""
        return self.after if self.layer is None else self.layer


@dataclass(frozen=True, kw_only=True)
class BlockSpan:
    """Range of a block in the ordered events of a trace."""

    key: BlockKey
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class TraceBlock:
    """Events of one block, in columns."""

    key: BlockKey
    numbers: Integers  # the allocation that each event makes or frees
    deltas: Integers  # bytes allocated (or, negative, freed) by each event
    parts: Integers  # index in PARTS of each event's allocation


def block_spans(trace: Trace) -> list[BlockSpan]:
    """Return all blocks with events. Neighbours between the same layers are one block."""
    spans: list[BlockSpan] = []
    runs: Counter[tuple[Phase, int]] = Counter()
    occurrences: Counter[tuple[Stay, int | None, int | None]] = Counter()
    stay: Stay | None = None
    after: int | None = None
    for mark, events in trace.stretches():
        if not len(events):
            continue
        # 1. The stay in a phase, and the last layer in it.
        if stay is None or (mark.phase, mark.step) != stay[:2]:
            runs[mark.phase, mark.step] += 1
            stay = Stay(mark.phase, mark.step, runs[mark.phase, mark.step])
            after = None
        if mark.layer is not None:
            after = mark.layer
        # 2. A new block, or more of the one before.
        identity = (stay, mark.layer, after)
        if spans and mark.layer is None:
            before = spans[-1]
            if before.key[:3] == identity and before.stop == events.start:
                spans[-1] = BlockSpan(
                    key=before.key,
                    start=before.start,
                    stop=events.stop,
                )
                continue
        key = BlockKey(*identity, occurrences[identity])
        occurrences[identity] += 1
        spans.append(
            BlockSpan(
                key=key,
                start=events.start,
                stop=events.stop,
            )
        )
    return spans


def ordered_events(trace: Trace, spans: Sequence[BlockSpan]) -> Integers:
    """Return the events in a deterministic order.

    Frees between two allocations are simultaneous and in arbitrary order: they are sorted by
    number, within a block and between two uses of modules.
    """
    events = np.array(trace.events, dtype=np.int64)
    starts = [span.start for span in spans]
    if trace.usage is not None:
        starts += [use[0] for use in trace.usage.uses if use[0] < len(events)]
    # A run is a series of events of one sign in which none of `starts` lies.
    begins_run = np.append(True, (events[1:] > 0) != (events[:-1] > 0))
    begins_run[np.array(starts, dtype=np.int64)] = True
    order = np.lexsort((np.abs(events), np.cumsum(begins_run)))
    ordered: Integers = events[order]
    return ordered


def blocks_of(trace: Trace) -> tuple[TraceBlock, ...]:
    """Return all blocks in order."""
    spans = block_spans(trace)
    events = ordered_events(trace, spans)
    numbers = np.abs(events) - 1
    deltas = np.sign(events) * np.array(trace.sizes, dtype=np.int64)[numbers]
    part_codes = np.array([PARTS.index(name) for name in trace.part_names], dtype=np.int64)
    parts = part_codes[np.array(trace.parts, dtype=np.int64)][numbers]

    blocks = []
    for span in spans:
        place = slice(span.start, span.stop)
        blocks.append(
            TraceBlock(
                key=span.key,
                numbers=numbers[place],
                deltas=deltas[place],
                parts=parts[place],
            )
        )
    return tuple(blocks)


class BlockedTrace:
    """A trace in blocks, with the marks and the uses of modules of each block.

    Marks and uses are kept with the offset of their event in the block.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.spans = block_spans(trace)
        self.keys = [span.key for span in self.spans]
        self._events: list[int] = ordered_events(trace, self.spans).tolist()
        self.origins = self._origins()
        self.marks = self._marks_by_block()
        self.uses = self._uses_by_block()

    def events_of(self, block: int) -> list[int]:
        span = self.spans[block]
        return self._events[span.start : span.stop]

    def event_at(self, block: int, offset: int) -> int:
        return self._events[self.spans[block].start + offset]

    def size_and_part(self, event: int) -> tuple[int, int]:
        """Return size and part of the allocation that an event makes or frees."""
        number = abs(event) - 1
        return self.trace.sizes[number], self.trace.parts[number]

    def _origins(self) -> list[tuple[int, int]]:
        """Return block and offset of the event that makes each allocation."""
        origins = [(0, 0)] * len(self.trace.sizes)
        for block in range(len(self.spans)):
            for offset, event in enumerate(self.events_of(block)):
                if event > 0:
                    origins[event - 1] = (block, offset)
        return origins

    def _marks_by_block(self) -> list[list[tuple[int, Mark]]]:
        marks: list[list[tuple[int, Mark]]] = [[] for _ in self.spans]
        block, last = 0, len(self.spans) - 1
        for mark in self.trace.marks:
            while block < last and mark.event >= self.spans[block].stop:
                block += 1
            marks[block].append((mark.event - self.spans[block].start, mark))
        return marks

    def _uses_by_block(self) -> list[list[Use]]:
        """Return each block's uses; at the edge of two blocks, ends belong to the one before."""
        uses: list[list[Use]] = [[] for _ in self.spans]
        if self.trace.usage is None:
            return uses
        block, last = 0, len(self.spans) - 1
        for event, kind, *details in self.trace.usage.uses:
            ends = kind in ENDINGS
            while block < last and event >= self.spans[block].stop + ends:
                block += 1
            uses[block].append((event - self.spans[block].start, kind, *details))
        return uses

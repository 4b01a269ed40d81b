"""A trace cut into blocks: the stretch of one layer in one pass, or what lies between layers.

The middle layers of a model repeat each other, so the blocks of a long model are those of a short one with the group of
its middle layers repeated. Whether that is so is checked, block by block, on two lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from autotune.measurement import Phase
from autotune.trace import Part, Trace

PARTS: tuple[Part, ...] = get_args(Part)

Integers = NDArray[np.int64]


class NotUniform(Exception):
    """The model's layers do not repeat each other as they should; the text says where."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """Which block it is, whatever the length of the model and the size of the batch."""

    phase: Phase
    step: int
    run: int
    """The how-manieth stay in this phase within the step."""

    layer: int | None
    """The layer that runs; None between layers."""

    after: int | None
    """The last layer that ran in this stay; None before the first."""

    occurrence: int
    """The how-manieth block of all this: passes within one stay repeat the layers."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block's events."""

    key: Key
    numbers: Integers
    """The allocation that each event makes or gives back."""

    deltas: Integers
    """Bytes taken (or, negative, given back) by each event."""

    parts: Integers
    """What each event's allocation is, by its place in PARTS."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where in a trace's settled events a block is."""

    key: Key
    start: int
    stop: int


def spans_of(trace: Trace) -> tuple[list[int], list[Span]]:
    """The trace's events in an order that chance does not decide, and every block in it; stretches without events are none."""
    events = np.array(trace.events, dtype=np.int64)
    spans = [Span(key=key, start=start, stop=stop) for key, start, stop in _spans(trace) if stop > start]
    uses = [use[0] for use in trace.usage.uses if use[0] < len(events)] if trace.usage else []
    settled: list[int] = events[_settled(events, [*(span.start for span in spans), *uses])].tolist()
    return settled, spans


def blocks_of(trace: Trace) -> tuple[Block, ...]:
    """Every block in its order."""
    settled, spans = spans_of(trace)
    sizes, events = np.array(trace.sizes, dtype=np.int64), np.array(settled, dtype=np.int64)
    names = np.array([PARTS.index(name) for name in trace.part_names], dtype=np.int64)
    numbers = np.abs(events) - 1
    deltas = np.sign(events) * sizes[numbers]
    parts = names[np.array(trace.parts, dtype=np.int64)][numbers]
    return tuple(
        Block(key=one.key, numbers=numbers[span], deltas=deltas[span], parts=parts[span])
        for one in spans
        for span in (slice(one.start, one.stop),)
    )


def _settled(events: Integers, starts: Sequence[int]) -> Integers:
    """An order in which what is given back at one moment is so in the order in which it was made: otherwise chance decides."""
    begins = np.append(True, (events[1:] > 0) != (events[:-1] > 0))
    begins[np.array(starts, dtype=np.int64)] = True
    return np.asarray(np.lexsort((np.abs(events), np.cumsum(begins))), dtype=np.int64)


def _spans(trace: Trace) -> Iterator[tuple[Key, int, int]]:
    """Keys with their first and last event. Neighbours that differ in nothing are one."""
    runs: Counter[tuple[Phase, int]] = Counter()
    seen: Counter[tuple[object, ...]] = Counter()
    place: tuple[Phase, int] | None = None
    after: int | None = None
    pending: tuple[tuple[Phase, int, int, int | None, int | None], int, int] | None = None
    for mark, span in trace.stretches():
        if not len(span):
            continue
        if (mark.phase, mark.step) != place:
            place, after = (mark.phase, mark.step), None
            runs[place] += 1
        after = mark.layer if mark.layer is not None else after
        what = (mark.phase, mark.step, runs[place], mark.layer, after)
        if pending is not None and pending[0] == what and pending[2] == span.start and mark.layer is None:
            pending = (what, pending[1], span.stop)
            continue
        if pending is not None:
            yield _key(pending[0], seen), pending[1], pending[2]
        pending = (what, span.start, span.stop)
    if pending is not None:
        yield _key(pending[0], seen), pending[1], pending[2]


def _key(what: tuple[Phase, int, int, int | None, int | None], seen: Counter[tuple[object, ...]]) -> Key:
    phase, step, run, layer, after = what
    seen[what] += 1
    return Key(phase=phase, step=step, run=run, layer=layer, after=after, occurrence=seen[what] - 1)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """How a short model becomes a long one: the group of layers `first` to `first + period - 1` comes again `copies` times."""

    layers: int
    """Of the short model."""

    first: int
    period: int
    copies: int

    def order(self, keys: Sequence[Key]) -> Iterator[tuple[int, bool]]:
        """Places in `keys`, in the long model's order, and whether it is a repetition."""
        group: list[int] = []
        for place, key in enumerate(keys):
            of = key.layer if key.layer is not None else key.after
            inside = of is not None and self.first <= of < self.first + self.period
            if group and not (inside and _same_stay(keys[group[-1]], key)):
                yield from self._again(group)
                group = []
            if inside:
                group.append(place)
            yield place, False
        yield from self._again(group)

    def _again(self, group: Sequence[int]) -> Iterator[tuple[int, bool]]:
        for _ in range(self.copies):
            for place in group:
                yield place, True


def _same_stay(one: Key, other: Key) -> bool:
    return (one.phase, one.step, one.run) == (other.phase, other.step, other.run)

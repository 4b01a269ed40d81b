"""A trace cut into blocks: the stretch of one layer in one pass, or what lies between layers.

The middle layers of a model repeat each other, so the blocks of a long model are those of a short one with the group of
its middle layers repeated. Whether that is so is checked, block by block, on two lengths.
"""

from __future__ import annotations

import difflib
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
    deltas: Integers
    """Bytes taken (or, negative, given back) by each event."""

    parts: Integers
    """What each event's allocation is, by its place in PARTS."""

    @property
    def tops(self) -> Integers:
        """Events after which live memory is at a local maximum."""
        rising = self.deltas > 0
        falls_next = np.append(~rising[1:], True)
        return np.flatnonzero(rising & falls_next)

    def net(self) -> Integers:
        """Bytes by part that are more when it ends than when it began."""
        return _summed(self.deltas, self.parts)

    def peak(self) -> Integers:
        """Bytes by part, above what was there when it began, at the highest moment; zeros where it only gives back."""
        live = np.cumsum(self.deltas)
        if not len(live) or live.max() <= 0:
            return np.zeros(len(PARTS), dtype=np.int64)
        top = int(live.argmax()) + 1
        return _summed(self.deltas[:top], self.parts[:top])


def blocks_of(trace: Trace) -> tuple[Block, ...]:
    """Every block in its order; stretches without events are none."""
    sizes, events = np.array(trace.sizes, dtype=np.int64), np.array(trace.events, dtype=np.int64)
    names = np.array([PARTS.index(name) for name in trace.part_names], dtype=np.int64)
    spans = [span for span in _spans(trace) if span[2] > span[1]]
    events = events[_settled(events, [start for _, start, _ in spans])]
    numbers = np.abs(events) - 1
    deltas = np.sign(events) * sizes[numbers]
    parts = names[np.array(trace.parts, dtype=np.int64)][numbers]
    return tuple(Block(key=key, deltas=deltas[start:stop], parts=parts[start:stop]) for key, start, stop in spans)


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


def growth(short: Sequence[Block], long: Sequence[Block], stretch: Stretch) -> dict[int, Block]:
    """By its place in `short`: the long model's block, where it is another. `stretch` makes the one of the other.

    NotUniform where the long model is not the short one with its middle layers repeated.
    """
    order = list(stretch.order([block.key for block in short]))
    if len(order) != len(long):
        raise NotUniform(f"{len(long)} stretches where {len(order)} were expected")
    grown: dict[int, Block] = {}
    for (place, repeated), found in zip(order, long, strict=True):
        block = short[place]
        if (block.key.phase, block.key.step, block.key.run) != (found.key.phase, found.key.step, found.key.run):
            raise NotUniform(f"{found.key.phase} where {block.key.phase} was expected")
        if np.array_equal(block.deltas, found.deltas):
            continue
        if repeated or found.key.layer is not None:
            raise NotUniform(f"layer {found.key.layer} in phase {found.key.phase} is not like its neighbours")
        grown[place] = found
    return grown


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a block that grows with the model."""

    start: int | None
    """The first of the short block's events that it consists of; None where the long one has more."""

    deltas: Integers
    """Of events that there are more of, with each group of layers; or how much the short one's grow, each."""

    parts: Integers


def segments(short: Block, long: Block) -> tuple[Segment, ...] | None:
    """The long block as the short one's events, with more of them put in between or some grown; None where it is neither."""
    found: list[Segment] = []
    before = [(int(delta), int(part)) for delta, part in zip(short.deltas, short.parts, strict=True)]
    after = [(int(delta), int(part)) for delta, part in zip(long.deltas, long.parts, strict=True)]
    for kind, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "insert":
            found.append(Segment(start=None, deltas=long.deltas[k:m], parts=long.parts[k:m]))
        elif kind == "delete" or j - i != m - k or not np.array_equal(short.deltas[i:j] > 0, long.deltas[k:m] > 0):
            return None
        else:
            found.append(Segment(start=i, deltas=long.deltas[k:m] - short.deltas[i:j], parts=short.parts[i:j]))
    return tuple(found)


def _summed(deltas: Integers, parts: Integers) -> Integers:
    total = np.zeros(len(PARTS), dtype=np.int64)
    np.add.at(total, parts, deltas)
    return total

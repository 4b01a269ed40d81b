"""All points of a space from a few short traces: what a step takes at any batch and lengths, in any number of layers.

Between two points of one space the events of a step are the same, only their sizes differ, and each size is a short sum of
products of batch and lengths (`monomials`). So every local maximum of a step is such a sum too, a *piece*, and the peak of a
phase is the largest of its pieces. Extrapolating the peak itself would go wrong where another piece takes over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autotune.measurement import Phase
from autotune.predict.pieces.blocks import PARTS, Block, NotUniform, Segment, Stretch, blocks_of, growth, segments
from autotune.predict.pieces.monomials import Basis, Floats
from autotune.predict.pieces.points import Point, Sample, rows_of
from autotune.predict.pieces.vocabulary import Vocabulary
from autotune.predict.pieces.works import Counted, Works, inventory_of
from autotune.trace import Part, Trace


@dataclass(frozen=True, kw_only=True)
class Heights:
    """Requested bytes at points of a space, a row for each point."""

    phases: Mapping[Phase, NDArray[np.int64]]
    """By phase: bytes by part, in the order of PARTS, when most is requested."""

    resting: NDArray[np.int64]
    """The same between two steps: the state."""

    def highest(self) -> list[int]:
        """The peak over all phases, for each point."""
        return [int(peak) for peak in np.max([rows.sum(axis=1) for rows in self.phases.values()], axis=0)]

    def parts(self, phase: Phase, row: int) -> dict[Part, int]:
        return _named(self.phases[phase][row])

    def parts_at_rest(self, row: int) -> dict[Part, int]:
        return _named(self.resting[row])


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a family's steps take, as a function of the point."""

    basis: Basis
    phases: tuple[Phase, ...]
    tops: Mapping[Phase, Floats]
    """By phase: pieces x parts x terms."""

    resting: Floats
    """Parts x terms."""

    works: Works
    shell: Trace
    """What else a trace says (versions, notes, the whole model's inventory), without its events."""

    exact: bool
    """Whether every size was found to be a sum of terms; where not, only a check tells how far it is off."""

    vocabulary: Vocabulary
    """What sizes were found to be: most of them come again in other families of the same model."""

    events: int = 0
    """Of a short model's step: what it takes to follow the whole one goes by it."""

    residual: float = 0.0
    """Largest relative error seen where it was checked against a trace."""

    def at(self, points: Sequence[Point]) -> Heights:
        """Every phase's peak at every point."""
        values = self.basis.values(rows_of(points))
        return Heights(
            phases={phase: _highest(pieces, values) for phase, pieces in self.tops.items()},
            resting=_whole(np.einsum("pt,ut->up", self.resting, values)),
        )


def fit(samples: Sequence[Sample], stretch: Stretch, longer: Trace | None) -> Pieces:
    """From traces of a short model at several points, and one of a longer one at the first of them.

    NotUniform where the traces do not have the same course, or the longer one is not the short one stretched.
    """
    return Learnt(samples, stretch, longer).pieces(stretch)


class Learnt:
    """What traces of a short model say of every point, in models of any length. With what another family lends, two points do."""

    def __init__(self, samples: Sequence[Sample], stretch: Stretch, longer: Trace | None, lent: Pieces | None = None) -> None:
        laid = [blocks_of(sample.trace) for sample in samples]
        if any([block.key for block in other] != [block.key for block in laid[0]] for other in laid):
            raise NotUniform("the step takes another course at another point")
        grown = {} if longer is None else growth(laid[0], blocks_of(longer), _once(stretch))
        self._samples, self._longer, self._lent, self._first = samples, longer, lent, laid[0]
        self._fitted = _Fitted(rows_of([one.point for one in samples]), laid, grown, lent.vocabulary if lent else None)

    def pieces(self, stretch: Stretch, check: Sample | None = None) -> Pieces:
        """`check` is another trace of a longer model, for what is counted."""
        fitted, counted = self._fitted, Counted(samples=self._samples, longer=self._longer, check=check)
        tops, resting = _walk(fitted, stretch)
        return Pieces(
            basis=fitted.basis,
            phases=tuple(dict.fromkeys(block.key.phase for block in self._first)),
            tops={phase: _undominated(np.stack(pieces)) for phase, pieces in tops.items()},
            resting=resting,
            works=counted.works(stretch, self._lent.works if self._lent else None),
            shell=_shell(self._samples[0].trace, self._longer, stretch),
            exact=fitted.exact,
            vocabulary=fitted.vocabulary,
            events=len(self._samples[0].trace.events),
        )

    def error_at(self, stretch: Stretch, sample: Sample) -> float:
        """How far the largest peak of a phase is off, relative to the highest."""
        tops, _ = _walk(self._fitted, stretch)
        values = self._fitted.basis.values(rows_of([sample.point]))
        found = {phase: _highest(np.stack(pieces), values) for phase, pieces in tops.items()}
        return _error({phase: int(rows[0].sum()) for phase, rows in found.items()}, phase_peaks(sample.trace))


def _shell(trace: Trace, longer: Trace | None, stretch: Stretch) -> Trace:
    inventory = inventory_of(trace, longer, stretch)
    layers = trace.layers + stretch.copies * stretch.period
    return replace(trace, sizes=(), parts=(), events=(), usage=None, inventory=inventory, layers=layers)


def error_at(pieces: Pieces, sample: Sample) -> float:
    """How far the largest peak is off where a trace of the same length is at hand, relative to it."""
    found = pieces.at([sample.point])
    return _error({phase: int(rows[0].sum()) for phase, rows in found.phases.items()}, phase_peaks(sample.trace))


def _error(predicted: Mapping[Phase, int], traced: Mapping[Phase, int]) -> float:
    if set(predicted) != set(traced):
        return float("inf")
    highest = max(traced.values())
    return max(abs(predicted[phase] - traced[phase]) for phase in traced) / highest


def phase_peaks(trace: Trace) -> dict[Phase, int]:
    """Requested bytes at most while each phase runs, what is there when it begins included."""
    peaks: dict[Phase, int] = {}
    live = 0
    for mark, span in trace.stretches():
        if not len(span):
            continue
        peaks[mark.phase] = max(live, peaks.get(mark.phase, 0))
        for at in span:
            entry = trace.events[at]
            live += trace.sizes[entry - 1] if entry > 0 else -trace.sizes[-entry - 1]
            if live > peaks[mark.phase]:
                peaks[mark.phase] = live
    return peaks


class _Fitted:
    """Blocks whose sizes are functions of the point."""

    def __init__(
        self, points: Floats, laid: Sequence[Sequence[Block]], grown: Mapping[int, Block], lent: Vocabulary | None
    ) -> None:
        self.keys = [block.key for block in laid[0]]
        self._base, self._grown = laid[0], grown
        self._segments = {place: segments(laid[0][place], block) for place, block in grown.items()}
        self._places: list[tuple[bool, int, int]] = []
        rows: list[Floats] = []
        for place, several in enumerate(zip(*laid, strict=True)):
            by_event = _alike(several) and (place not in grown or self._segments[place] is not None)
            rows.append(_by_event(several) if by_event else _in_sum(several))
            start = self._places[-1][2] if self._places else 0
            self._places.append((by_event, start, start + len(rows[-1])))
        vectors, back = np.unique(np.concatenate(rows), axis=0, return_inverse=True)
        said = (lent or Vocabulary.empty()).say(points, vectors)
        self.basis, self.exact, self.terms = said.vocabulary.basis, bool(said.exactly.all()), len(said.vocabulary.basis.terms)
        self.vocabulary = said.vocabulary
        self._coefficients: Floats = said.coefficients[back.reshape(-1)]

    def block(self, place: int, copies: int) -> tuple[Floats, Floats]:
        """Its local maxima above what was there before, pieces x parts x terms, and what it leaves, parts x terms."""
        by_event, start, stop = self._places[place]
        nothing = np.zeros((1, len(PARTS), self.terms))
        if not by_event:
            net, peak = self._in_sum(place, start, stop, copies)
            return _undominated(np.concatenate([nothing, peak[np.newaxis]])), net
        coefficients, parts, rising = self._events(place, start, stop, copies)
        spread = np.zeros((len(parts), len(PARTS), self.terms))
        spread[np.arange(len(parts)), parts] = coefficients
        running = np.cumsum(spread, axis=0)
        tops = np.flatnonzero(rising & np.append(~rising[1:], True))
        return _undominated(np.concatenate([nothing, running[tops]])), np.asarray(running[-1])

    def _events(self, place: int, start: int, stop: int, copies: int) -> tuple[Floats, NDArray[np.int64], NDArray[np.bool_]]:
        """Each event's coefficients, part, and whether it takes memory, in the long model."""
        base, own = self._base[place], self._coefficients[start:stop]
        several = self._segments.get(place)
        if several is None:
            return own, base.parts, base.deltas > 0
        rows: list[Floats] = []
        parts: list[NDArray[np.int64]] = []
        rising: list[NDArray[np.bool_]] = []
        for segment in several:
            times, row, signs = self._segment(segment, base, own, copies)
            rows.append(np.tile(row, (times, 1)))
            parts.append(np.tile(segment.parts, times))
            rising.append(np.tile(signs, times))
        return np.concatenate(rows), np.concatenate(parts), np.concatenate(rising)

    def _segment(self, segment: Segment, base: Block, own: Floats, copies: int) -> tuple[int, Floats, NDArray[np.bool_]]:
        """How often it comes, and its events."""
        if segment.start is None:
            row = np.zeros((len(segment.parts), self.terms))
            row[:, 0] = segment.deltas
            return copies, row, segment.deltas > 0
        span = slice(segment.start, segment.start + len(segment.parts))
        row = own[span].copy()
        row[:, 0] += copies * segment.deltas
        return 1, row, base.deltas[span] > 0

    def _in_sum(self, place: int, start: int, stop: int, copies: int) -> tuple[Floats, Floats]:
        middle = start + (stop - start) // 2
        net, peak = self._coefficients[start:middle].copy(), self._coefficients[middle:stop].copy()
        if place in self._grown:
            net[:, 0] += copies * (self._grown[place].net() - self._base[place].net())
            peak[:, 0] += copies * (self._grown[place].peak() - self._base[place].peak())
        return net, peak


def _alike(several: Sequence[Block]) -> bool:
    """Whether they have the same events, of whatever sizes."""
    base = several[0]
    return all(len(one.deltas) == len(base.deltas) and np.array_equal(one.deltas > 0, base.deltas > 0) for one in several)


def _by_event(several: Sequence[Block]) -> Floats:
    return np.stack([block.deltas for block in several], axis=1).astype(np.float64)


def _in_sum(several: Sequence[Block]) -> Floats:
    """What each leaves by part, and then what is there at its highest moment by part."""
    nets, peaks = [block.net() for block in several], [block.peak() for block in several]
    return np.concatenate([np.stack(nets, axis=1), np.stack(peaks, axis=1)]).astype(np.float64)


def _walk(fitted: _Fitted, stretch: Stretch) -> tuple[dict[Phase, list[Floats]], Floats]:
    """All pieces by phase, in the long model's order, and what is held between two steps."""
    live = np.zeros((len(PARTS), fitted.terms))
    found: dict[Phase, list[Floats]] = {}
    resting: Floats | None = None
    known: dict[int, tuple[Floats, Floats]] = {}
    for place, _ in stretch.order(fitted.keys):
        key = fitted.keys[place]
        if place not in known:
            known[place] = fitted.block(place, stretch.copies)
        tops, net = known[place]
        if resting is None and key.step >= 1 and key.phase != "load":
            resting = live.copy()
        found.setdefault(key.phase, []).extend(live + tops)
        live = live + net
    return found, live if resting is None else resting


def _undominated(pieces: Floats) -> Floats:
    """Terms are never negative, so a piece that has less of each than another is nowhere the largest."""
    totals = np.round(pieces.sum(axis=1), 3)
    _, first = np.unique(totals, axis=0, return_index=True)
    order = first[np.argsort(-totals[first].sum(axis=1), kind="stable")]
    kept: list[int] = []
    standing = np.empty((0, totals.shape[1]))
    for place in order:
        if len(kept) and bool((standing >= totals[place]).all(axis=1).any()):
            continue
        kept.append(int(place))
        standing = np.concatenate([standing, totals[place : place + 1]])
    return pieces[sorted(kept)]


def _highest(pieces: Floats, values: Floats) -> NDArray[np.int64]:
    """Bytes by part of the highest piece, for each row of values."""
    totals = pieces.sum(axis=1) @ values.T
    best = totals.argmax(axis=0)
    return _whole(np.einsum("upt,ut->up", pieces[best], values))


def _once(stretch: Stretch) -> Stretch:
    return Stretch(layers=stretch.layers, first=stretch.first, period=stretch.period, copies=1)


def _whole(values: Floats) -> NDArray[np.int64]:
    return np.rint(values).astype(np.int64)


def _named(row: NDArray[np.int64]) -> dict[Part, int]:
    return {part: int(size) for part, size in zip(PARTS, row, strict=True) if size}

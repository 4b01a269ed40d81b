"""A family: candidates that differ in their points alone, and the steps of each, made from what is common to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autotune.measurement import Phase
from autotune.predict.around import Surroundings
from autotune.predict.pieces import Pieces, phase_peaks
from autotune.predict.pieces.blocks import Integers
from autotune.predict.pieces.points import Point, rows_of
from autotune.predict.sharding import Sharded, Sharding, worst_rank
from autotune.predict.usage import Stage
from autotune.trace import Trace


class Family:
    """What was found out in one, as it is spread over its ranks."""

    def __init__(self, points: Sequence[Point], pieces: Pieces, sharding: Sharding) -> None:
        self.points, self.pieces = list(points), pieces
        self.sharded: Sharded = worst_rank(pieces.trace, sharding)
        """At the first point that was followed. What a sharding library adds is the same at every point."""
        self._added = np.array(self.sharded.trace.sizes[len(pieces.trace.sizes) :], dtype=np.int64)
        events = np.array(pieces.trace.events, dtype=np.int64)
        self._signs, self._numbers = np.sign(events), np.abs(events) - 1
        self._stages: list[Stage] = []

    @property
    def trace(self) -> Trace:
        return self.sharded.trace

    def covers(self, points: Sequence[Point]) -> bool:
        """Whether these lie where the family was looked at."""
        known, asked = zip(*(one.row for one in self.points), strict=True), zip(*(one.row for one in points), strict=True)
        return all(min(ours) <= min(theirs) and max(theirs) <= max(ours) for ours, theirs in zip(known, asked, strict=True))

    def requested(self, point: Point) -> dict[Phase, int]:
        """Bytes that are requested at most in each phase of a point's step, before it is spread."""
        return phase_peaks(self.pieces.trace, self.pieces.at([point])[0])

    def traces(self, points: Sequence[Point]) -> Iterator[tuple[Point, Trace, Integers]]:
        """What each point's trace says, its sizes apart from its events: those are the first point's."""
        works, extra = self.pieces.works.at(rows_of(points)), self.pieces.high_extra_bytes(points)
        for point, work, more in zip(points, works, extra, strict=True):
            own = self.pieces.at([point])[0]
            trace = replace(self.trace, work=work, high_extra_bytes=more + self._doubt(own))
            yield point, trace, np.concatenate([own, self._added])

    def _doubt(self, sizes: Integers) -> int:
        """As much as the check was off."""
        residual = self.pieces.residual
        return round(residual * int(np.cumsum(self._signs * sizes[self._numbers]).max())) if residual else 0

    def stage(self, sizes: Integers, around: Surroundings) -> Stage:
        """One point's step amid its surroundings, ready to be replayed."""
        for one in self._stages:
            if (found := one.at(sizes, around)) is not None:
                return found
        self._stages.append(Stage(self.trace, around))
        found = self._stages[-1].at(sizes, around)
        assert found is not None
        return found

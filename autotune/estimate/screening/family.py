"""Family: candidates that differ in their points only, with traces from one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autotune.core.measurement import Phase
from autotune.core.trace import Trace
from autotune.estimate.phase_usage import StepStage
from autotune.estimate.screening import StepModel, phase_peaks
from autotune.estimate.screening.blocks import Integers, Point, rows_of
from autotune.estimate.sharding import Sharded, Sharding, worst_rank
from autotune.estimate.trace_context import TraceContext


class Family:
    """The step model of a family, sharded over its ranks."""

    def __init__(self, points: Sequence[Point], model: StepModel, sharding: Sharding) -> None:
        self.points, self.model = list(points), model
        self.sharded: Sharded = worst_rank(model.trace, sharding)
        """The sharded trace at the first point; a sharding library adds the same at every point."""
        self._added = np.array(self.sharded.trace.sizes[len(model.trace.sizes) :], dtype=np.int64)
        events = np.array(model.trace.events, dtype=np.int64)
        self._signs, self._numbers = np.sign(events), np.abs(events) - 1
        self._stages: list[StepStage] = []

    def covers(self, points: Sequence[Point]) -> bool:
        """Return True if the points are within the range of the model."""
        known, asked = zip(*(one.row for one in self.points), strict=True), zip(*(one.row for one in points), strict=True)
        return all(min(ours) <= min(theirs) and max(theirs) <= max(ours) for ours, theirs in zip(known, asked, strict=True))

    def requested(self, point: Point) -> dict[Phase, int]:
        """Return the peak of requested bytes in each phase of a point's step, before sharding."""
        return phase_peaks(self.model.trace, self.model.at([point])[0])

    def traces(self, points: Sequence[Point]) -> Iterator[tuple[Point, Trace, Integers]]:
        """Yield each point's trace and sizes; those in the trace are the first point's."""
        work, extra = self.model.work.at(rows_of(points)), self.model.sizes.high_extra_bytes(points)
        residual = self.model.residual
        for point, own_work, more in zip(points, work, extra, strict=True):
            (sizes,) = self.model.at([point])
            margin = round(residual * int(np.cumsum(self._signs * sizes[self._numbers]).max())) if residual else 0
            trace = replace(self.sharded.trace, work=own_work, high_extra_bytes=more + margin)
            yield point, trace, np.concatenate([sizes, self._added])

    def stage(self, sizes: Integers, context: TraceContext) -> StepStage:
        """Return one point's step in its context, ready for an allocator replay."""
        for one in self._stages:
            if (found := one.at(sizes, context)) is not None:
                return found
        self._stages.append(StepStage(self.sharded.trace, context))
        found = self._stages[-1].at(sizes, context)
        assert found is not None
        return found

"""Families: a step model, sharded over ranks, at each point of the family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autotune.core.trace import Trace
from autotune.estimate.replay import StepStage
from autotune.estimate.screening.points import OF_ONE_TRACE, Integers, Point, integers
from autotune.estimate.screening.step_model import StepModel, steps_at
from autotune.estimate.trace_context import PredictionInput, TraceContext

MAX_LATEST = 32  # steps whose replays are kept


class Family:
    """The step model of a family, sharded over its ranks.

    Sharding rewrites one trace, at the first point, in the full depth. The rank that reserves most
    there represents the family: at other points its events, marks and inventory are used again,
    with other sizes.

        allocations of the rank      1 ... n                  n + 1 ...
        made by                      the model's step         sharding: buckets, gathered weights
        size at x                    the step model's         the same as at the first point

    Sharding keeps the numbers of the step's allocations, and adds its own behind them: these follow
    from the parameters, which the point does not change.
    """

    def __init__(
        self,
        points: Sequence[Point],
        model: StepModel,
        rank: PredictionInput,
        stage: StepStage,
    ) -> None:
        """`rank`: the one that reserves most at the first point, whose step in a context is
        `stage`; a sharding library adds the same at every point.
        """
        self.points = list(points)
        self.model = model
        self.rank = rank
        unsharded = len(model.trace.sizes)
        self._added_sizes = integers(rank.trace.sizes[unsharded:])
        self._effective: dict[str, object] = {}  # the trainer's report, as it holds at each point
        for name, value in rank.trace.effective.items():
            if name not in OF_ONE_TRACE:
                self._effective[name] = value
        self._stages = [stage]
        self._latest: dict[tuple[Point, TraceContext], StepStage] = {}

    def covers(self, points: Sequence[Point]) -> bool:
        """Return True if the points are within the range of the model."""
        surveyed = np.array(self.points)
        rows = np.array(points)
        reaches_least = surveyed.min(axis=0) <= rows.min(axis=0)
        reaches_largest = surveyed.max(axis=0) >= rows.max(axis=0)
        return bool(reaches_least.all() and reaches_largest.all())

    def traces(self, points: Sequence[Point]) -> Iterator[tuple[Point, Trace, Integers]]:
        """Yield each point's trace and sizes; those in the trace are the first point's."""
        for step in steps_at(self.model, points):
            trace = replace(
                self.rank.trace,
                work=step.work,
                high_extra_bytes=step.high_extra_bytes,
                derived_error_bytes=step.derived_error_bytes,
                effective=self._effective,
            )
            sizes = np.concatenate([step.sizes, self._added_sizes])
            yield step.point, trace, sizes

    def stage(
        self,
        point: Point,
        sizes: Integers,
        context: TraceContext,
    ) -> StepStage:
        """Return one point's step in its context, ready for an allocator replay. The latest ones
        keep their replays: many changes of a candidate leave the trainer's step as it is.
        """
        key = (point, context)
        if key not in self._latest:
            if len(self._latest) == MAX_LATEST:
                self._latest.clear()
            self._latest[key] = self._stage_at(sizes, context)
        return self._latest[key]

    def _stage_at(self, sizes: Integers, context: TraceContext) -> StepStage:
        for stage in self._stages:
            at_sizes = stage.at(sizes, context)
            if at_sizes is not None:
                return at_sizes
        stage = StepStage(self.rank.trace, context)
        self._stages.append(stage)
        at_sizes = stage.at(sizes, context)
        assert at_sizes is not None  # the stage was made in this context
        return at_sizes

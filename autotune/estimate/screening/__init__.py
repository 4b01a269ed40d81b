"""Screening: all points of a space from a few short traces.

Inside a family, a step is a function of the point (batch and lengths). Each allocation size is a
short formula of the point (`size_model`), and a long model's events are those of a short model with
its middle layers repeated (`stretching`). The full trace of any point is written from these without
tracing its step, and then passes through the same sharding and allocator replay as a real trace.

The simpler way (trace each family at its smallest and largest micro-batch in full depth,
interpolate between them) is slower and does not apply: a 7B's GRPO step has 69,565 events at
micro-batch 1 and 68,845 at 16. For one tier of the default space (84 candidates on one A100) its 12
traces alone take 70 CPU seconds; screening takes 53 with everything (26 short traces), and 64 for
all 18 tiers (1,512 candidates, 36 traces). The peaks of four candidates were within 0.002 % of
those of their own full traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.core.measurement import Phase
from autotune.core.trace import Trace
from autotune.estimate.replay import StepStage
from autotune.estimate.screening.blocks import Integers, NotUniform, Point, Sample, rows_of
from autotune.estimate.screening.layer_growth import LayerRepetition, grown_inventory
from autotune.estimate.screening.size_model import SizeModel
from autotune.estimate.screening.stretching import StretchedTrace, stretched
from autotune.estimate.screening.work_model import WorkModel, fit_work
from autotune.estimate.sharding import ShardedTrace
from autotune.estimate.trace_context import TraceContext

__all__ = ["NotUniform", "StepModel", "StepModelFit", "phase_peaks"]


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """The steps of a family as a function of the point."""

    long: StretchedTrace  # the full model's trace at the first point traced
    sizes: SizeModel
    work: WorkModel
    exact: bool  # True if every size is exact; otherwise `residual` is the only error estimate
    residual: float = 0.0  # largest relative error at the check trace

    @property
    def trace(self) -> Trace:
        return self.long.trace

    def at(self, points: Sequence[Point]) -> list[Integers]:
        """Return the sizes of the long trace's allocations, at each point."""
        return [self.long.sizes_of(own) for own in self.sizes.at(points)]


class StepModelFit:
    """Fit of a step model to short traces; with a `reference` two points suffice."""

    def __init__(self, samples: Sequence[Sample], longer: Trace | None, reference: StepModel | None = None) -> None:
        self._samples, self._longer, self._reference = samples, longer, reference
        # Most formulas of sizes occur again in other families of the same model.
        self._sizes = SizeModel(samples, reference.sizes.formulas if reference else None)

    def model(self, repetition: LayerRepetition, check: Sample | None = None) -> StepModel:
        """Return the model of the full depth; `check`: another trace of the longer model, used for the work.

        NotUniform if the longer model is not the short one with its middle layers repeated.
        """
        short, reference = self._samples[0].trace, self._reference
        long = stretched(short, self._longer, repetition)
        whole = replace(long.trace, inventory=grown_inventory(short, self._longer, repetition))
        loops = self._sizes.formulas.basis.terms
        work = fit_work(self._samples, self._longer, check, repetition, reference.work if reference else None, loops)
        return StepModel(long=replace(long, trace=whole), sizes=self._sizes, work=work, exact=self._sizes.exact)

    def error_at(self, repetition: LayerRepetition, sample: Sample) -> float:
        """Return the largest error of a phase's peak, relative to the highest peak."""
        long = stretched(self._samples[0].trace, self._longer, repetition)
        (sizes,) = self._sizes.at([sample.point])
        predicted, traced = phase_peaks(long.trace, long.sizes_of(sizes)), phase_peaks(sample.trace)
        if set(predicted) != set(traced):
            return float("inf")
        return max(abs(predicted[phase] - traced[phase]) for phase in traced) / max(traced.values())


def phase_peaks(trace: Trace, sizes: Integers | None = None) -> dict[Phase, int]:
    """Return the peak of requested bytes in each phase, with the bytes held at its beginning."""
    own = np.array(trace.sizes, dtype=np.int64) if sizes is None else sizes
    events = np.array(trace.events, dtype=np.int64)
    live = np.append(0, np.cumsum(np.sign(events) * own[np.abs(events) - 1]))
    peaks: dict[Phase, int] = {}
    for mark, span in trace.stretches():
        if len(span):
            peaks[mark.phase] = max(int(live[span.start : span.stop + 1].max()), peaks.get(mark.phase, 0))
    return peaks


class Family:
    """The step model of a family, sharded over its ranks."""

    def __init__(self, points: Sequence[Point], model: StepModel, rank: ShardedTrace, stage: StepStage) -> None:
        """`rank`: the one that reserves most at the first point, whose step in a context is `stage`; a sharding library adds
        the same at every point."""
        self.points, self.model, self.rank = list(points), model, rank
        self._added = np.array(rank.trace.sizes[len(model.trace.sizes) :], dtype=np.int64)
        events = np.array(model.trace.events, dtype=np.int64)
        self._signs, self._numbers = np.sign(events), np.abs(events) - 1
        self._stages = [stage]

    def covers(self, points: Sequence[Point]) -> bool:
        """Return True if the points are within the range of the model."""
        known, asked = zip(*(one.row for one in self.points), strict=True), zip(*(one.row for one in points), strict=True)
        return all(min(ours) <= min(theirs) and max(theirs) <= max(ours) for ours, theirs in zip(known, asked, strict=True))

    def traces(self, points: Sequence[Point]) -> Iterator[tuple[Point, Trace, Integers]]:
        """Yield each point's trace and sizes; those in the trace are the first point's."""
        work, extra = self.model.work.at(rows_of(points)), self.model.sizes.high_extra_bytes(points)
        residual = self.model.residual
        for point, own_work, more in zip(points, work, extra, strict=True):
            (sizes,) = self.model.at([point])
            margin = round(residual * int(np.cumsum(self._signs * sizes[self._numbers]).max())) if residual else 0
            trace = replace(self.rank.trace, work=own_work, high_extra_bytes=more, derived_error_bytes=margin)
            yield point, trace, np.concatenate([sizes, self._added])

    def stage(self, sizes: Integers, context: TraceContext) -> StepStage:
        """Return one point's step in its context, ready for an allocator replay."""
        for one in self._stages:
            if (found := one.at(sizes, context)) is not None:
                return found
        self._stages.append(StepStage(self.rank.trace, context))
        found = self._stages[-1].at(sizes, context)
        assert found is not None
        return found

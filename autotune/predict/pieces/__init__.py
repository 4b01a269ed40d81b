"""All points of a space from a few short traces: what a step takes at any batch and lengths, in any number of layers.

Each size is a function of the point (`sizes`), and a long model's events are those of a short one with its middle layers
repeated (`stretching`). So the whole trace of any point can be written down without following its step, and goes the way of
a followed one from there: through the sharding and through the allocator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.measurement import Phase
from autotune.predict.pieces.blocks import Integers, NotUniform, Stretch
from autotune.predict.pieces.points import Point, Sample
from autotune.predict.pieces.sizes import Sizes
from autotune.predict.pieces.stretching import Long, stretched
from autotune.predict.pieces.vocabulary import Vocabulary
from autotune.predict.pieces.works import Counted, Works, inventory_of
from autotune.trace import Trace

__all__ = ["Learnt", "NotUniform", "Pieces", "phase_peaks"]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a family's steps take, as a function of the point."""

    long: Long
    """The whole model's trace at the first point that was followed."""

    sizes: Sizes
    works: Works
    exact: bool
    """Whether every size was found to be a sum of terms; where not, only a check tells how far it is off."""

    residual: float = 0.0
    """Largest relative error seen where it was checked against a trace."""

    @property
    def trace(self) -> Trace:
        return self.long.trace

    @property
    def vocabulary(self) -> Vocabulary:
        """What sizes were found to be: most of them come again in other families of the same model."""
        return self.sizes.vocabulary

    def at(self, points: Sequence[Point]) -> list[Integers]:
        """The sizes of the long trace's allocations, at each point."""
        return [self.long.sizes_of(own) for own in self.sizes.at(points)]

    def high_extra_bytes(self, points: Sequence[Point]) -> list[int]:
        """Of a model of this length: more layers have no more of it at a time."""
        return self.sizes.high_extra_bytes(points)


class Learnt:
    """What traces of a short model say of every point, in models of any length. With what another family lends, two points do."""

    def __init__(self, samples: Sequence[Sample], longer: Trace | None, lent: Pieces | None = None) -> None:
        self._samples, self._longer, self._lent = samples, longer, lent
        self._sizes = Sizes(samples, lent.vocabulary if lent else None)

    def pieces(self, stretch: Stretch, check: Sample | None = None) -> Pieces:
        """`check` is another trace of a longer model, for what is counted.

        NotUniform where the longer model is not the short one with its middle layers repeated.
        """
        counted = Counted(samples=self._samples, longer=self._longer, check=check)
        short = self._samples[0].trace
        long = stretched(short, self._longer, stretch)
        whole = replace(long.trace, inventory=inventory_of(short, self._longer, stretch))
        return Pieces(
            long=replace(long, trace=whole),
            sizes=self._sizes,
            works=counted.works(stretch, self._lent.works if self._lent else None, self._sizes.vocabulary.basis.terms),
            exact=self._sizes.exact,
        )

    def error_at(self, stretch: Stretch, sample: Sample) -> float:
        """How far the largest peak of a phase is off, relative to the highest."""
        long = stretched(self._samples[0].trace, self._longer, stretch)
        (sizes,) = self._sizes.at([sample.point])
        return _error(phase_peaks(long.trace, long.sizes_of(sizes)), phase_peaks(sample.trace))


def _error(predicted: Mapping[Phase, int], traced: Mapping[Phase, int]) -> float:
    if set(predicted) != set(traced):
        return float("inf")
    highest = max(traced.values())
    return max(abs(predicted[phase] - traced[phase]) for phase in traced) / highest


def phase_peaks(trace: Trace, sizes: Integers | None = None) -> dict[Phase, int]:
    """Requested bytes at most while each phase runs, what is there when it begins included."""
    of = np.array(trace.sizes, dtype=np.int64) if sizes is None else sizes
    events = np.array(trace.events, dtype=np.int64)
    live = np.append(0, np.cumsum(np.sign(events) * of[np.abs(events) - 1]))
    peaks: dict[Phase, int] = {}
    for mark, span in trace.stretches():
        if len(span):
            peaks[mark.phase] = max(int(live[span.start : span.stop + 1].max()), peaks.get(mark.phase, 0))
    return peaks

"""Where in a space a trace was taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.predict.pieces.monomials import Floats
from autotune.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Point:
    """What candidates of one family differ in."""

    micro_batch: int
    prompt: int
    completion: int
    micro_steps: int
    """Micro-batches per generation (or, where nothing is generated, per optimizer step)."""

    @property
    def row(self) -> tuple[int, int, int, int]:
        return self.micro_batch, self.prompt, self.completion, self.micro_steps


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One trace and where it was taken."""

    point: Point
    trace: Trace


def rows_of(points: Sequence[Point]) -> Floats:
    return np.array([point.row for point in points], dtype=np.float64)

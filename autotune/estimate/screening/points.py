"""Points of a family: the settings in which its candidates differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotune.core.trace import Trace

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Booleans: TypeAlias = NDArray[np.bool_]


OF_ONE_TRACE = frozenset(
    """
    per_device_train_batch_size gradient_accumulation_steps steps_per_generation
    generation_batch_size num_generations max_completion_length
    longest_prompt_seen longest_completion_seen
    parameters parameters_on_this_rank trainable_parameters
    """.split()
)
"""What a trainer reports of its own point and number of layers: it holds for no other trace."""


class NotUniform(Exception):
    """The points or the layers differ in more than sizes; the text names the difference."""


class Point(NamedTuple):
    """A point x = (B, P, C, N)."""

    micro_batch: int
    prompt: int
    completion: int
    micro_steps: int  # micro-batches per generation (without generation, per optimizer step)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A trace and its point."""

    point: Point
    trace: Trace


def integers(values: ArrayLike) -> Integers:
    return np.array(values, dtype=np.int64)


def rows_of(points: Sequence[Point]) -> Floats:
    """Return the points as rows of B, P, C, N."""
    return np.array(points, dtype=np.float64)

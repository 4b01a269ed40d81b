"""Between two predictions of one candidate: rows as long as they may be, and as short as data may make them.

Where a micro-batch holds only real tokens, its size follows the data. The longest rows bound it from above; from below it is
one row of the longest length, the others next to nothing.
"""

from __future__ import annotations

import dataclasses

from autotune.prediction import Estimate, Prediction

DATA = "how long completions really are: micro-batches hold only real tokens, and not all of them need be of the longest length"


def between(longest: Prediction, shortest: Prediction) -> Prediction:
    """The longest rows' figures, with an interval down to the shortest's, and a verdict only where both agree."""
    if longest.fits is True or shortest.peak_memory_bytes.low >= longest.peak_memory_bytes.low:
        return longest
    fits = False if shortest.fits is False else None
    return dataclasses.replace(
        longest,
        fits=fits,
        peak_memory_bytes=_down_to(longest.peak_memory_bytes, shortest.peak_memory_bytes),
        torch_peak_allocated_bytes=_down_to(longest.torch_peak_allocated_bytes, shortest.torch_peak_allocated_bytes),
        torch_peak_reserved_bytes=_down_to(longest.torch_peak_reserved_bytes, shortest.torch_peak_reserved_bytes),
        depends_on=() if fits is not None else (DATA, *(cause for cause in longest.depends_on if cause != DATA)),
    )


def _down_to(longest: Estimate, shortest: Estimate) -> Estimate:
    return Estimate(value=longest.value, low=min(longest.low, shortest.low), high=longest.high)

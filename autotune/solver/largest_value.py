"""Largest value of one setting that fits, by bisection over predictions.

Allocated memory must not fall where the value rises, which is checked on every pair of predictions.
Reserved memory may, by a few percent: torch frees its cache near the limit. An interval gives two
answers: the largest value that surely fits, and the largest one that may fit.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autotune.core.errors import BadInput
from autotune.core.job import Job
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate
from autotune.core.units import format_bytes

Number = int | float

STEPS_PER_OCTAVE = 32  # values tried between a value above 64 and its double; below 64, every whole number
LARGEST_TRIED = 2**20
SHARES = tuple(round(step / 100, 2) for step in range(1, 100))
"""Values of a setting that is a share, like `vllm_gpu_memory_utilization`."""

EQUAL_MEMORY = 0.01  # difference of two peaks, as a share, below which neither is larger: the allocator's rounding


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One value with its prediction, or the rule that refuses it."""

    value: Number
    job: Job | None = None
    candidate: Candidate | None = None
    prediction: Prediction | None = None
    refusal: str | None = None

    @property
    def fits(self) -> bool | None:
        return False if self.prediction is None else self.prediction.fits


@dataclass(frozen=True, kw_only=True)
class LargestValue:
    """Answer of `solve SETTING`."""

    setting: str
    given: Number  # value of the request itself
    surely: Tried | None  # largest value whose whole interval is below the limit
    possibly: Tried | None  # largest value whose interval contains the limit; None: `surely` is the largest
    next: Tried | None  # smallest tried value above these; None: the largest value of all fits
    tried: tuple[Tried, ...]  # in order of the values


def values_from(start: Number, most: Number | None = None) -> tuple[Number, ...]:
    """Return the values among which is searched, ascending, `start` among them."""
    if isinstance(start, float):
        return tuple(sorted({*SHARES, start}))
    top = min(most or LARGEST_TRIED, LARGEST_TRIED)
    octaves = [2**power for power in range(6, LARGEST_TRIED.bit_length())]
    coarse = {octave + step * octave // STEPS_PER_OCTAVE for octave in octaves for step in range(STEPS_PER_OCTAVE)}
    return tuple(sorted({start, top, *(value for value in (*range(1, 64), *coarse) if value <= top)}))


@dataclass
class LargestValueSearch:
    """Bisection over an ascending list of values; every value is predicted once at most."""

    setting: str
    values: Sequence[Number]
    is_legal: Callable[[Number], bool]
    predict: Callable[[Number], Tried]
    _known: dict[Number, Tried] = field(default_factory=dict)

    def run(self, given: Number) -> LargestValue:
        surely = self._last(given, lambda tried: tried.fits is True)
        possibly = self._last(given if surely is None else surely, lambda tried: tried.fits is not False)
        tried = tuple(self._known[value] for value in sorted(self._known))
        peaks = [(one.value, one.prediction.peak_memory_bytes.value) for one in tried if one.prediction is not None]
        if len(peaks) > 1 and len({peak for _, peak in peaks}) == 1:
            raise BadInput(
                f"{self.setting}: without effect on memory from {peaks[0][0]} to {peaks[-1][0]}.",
                way_out="Solve for a setting that takes memory, like max_completion_length.",
            )
        top = max((value for value in (surely, possibly) if value is not None), default=None)
        return LargestValue(
            setting=self.setting,
            given=given,
            surely=None if surely is None else self._known[surely],
            possibly=None if possibly in (None, surely) else self._known[possibly],
            next=next((one for one in tried if top is None or one.value > top), None),
            tried=tried,
        )

    def _last(self, start: Number, holds: Callable[[Tried], bool]) -> Number | None:
        """Return the last value for which the condition holds; None: for none."""
        # 1. Double, or halve, until the condition changes.
        low: Number | None = None
        high: Number | None = None
        if holds(self._at(start)):
            low = start
            while high is None:
                double = self._double(low)
                if double == low:
                    return low
                low, high = (double, None) if holds(self._at(double)) else (low, double)
        else:
            high = value = start
            while low is None and value > self.values[0]:
                value = self.values[max(bisect.bisect_right(self.values, value / 2) - 1, 0)]
                if holds(self._at(value)):
                    low = value
                elif self._at(value).refusal is None:
                    high = value
        # 2. Bisect the legal values between.
        between = [value for value in self.values if (low is None or value > low) and value < high and self.is_legal(value)]
        below, above = 0, len(between)
        while below < above:
            middle = (below + above) // 2
            if holds(self._at(between[middle])):
                low, below = between[middle], middle + 1
            else:
                above = middle
        return low

    def _double(self, value: Number) -> Number:
        """Return the first legal value from twice the value on; twice the value itself if none of the
        next two octaves is legal; the value itself at the end of the list."""
        first = min(bisect.bisect_left(self.values, 2 * value), len(self.values) - 1)
        last = bisect.bisect_right(self.values, 8 * value)
        return next((one for one in self.values[first:last] if self.is_legal(one)), self.values[first])

    def _at(self, value: Number) -> Tried:
        if value not in self._known:
            self._known[value] = self.predict(value)
            self._refuse_falling()
        return self._known[value]

    def _refuse_falling(self) -> None:
        peaks = [(value, tried.prediction) for value, tried in sorted(self._known.items()) if tried.prediction is not None]
        for (low, before), (high, after) in pairwise(peaks):
            smaller, larger = before.peak_memory_bytes.value, after.peak_memory_bytes.value
            needs_less = after.torch_peak_allocated_bytes.value < before.torch_peak_allocated_bytes.value
            if needs_less and larger < smaller * (1 - EQUAL_MEMORY):
                raise BadInput(
                    f"{self.setting}: a larger value takes less memory ({format_bytes(smaller)} at {low}, "
                    f"{format_bytes(larger)} at {high}), so there is no largest one.",
                    way_out="Solve for a setting that takes more memory as it grows, like max_completion_length.",
                )

"""Largest value of one setting that fits, by interpolation and bisection over predictions.

Allocated memory must not fall where the value rises, which is checked on every pair of predictions.
Reserved memory may, by a few percent: torch frees its cache near the limit. An interval gives two
answers: the largest value that surely fits, and the largest one that may fit.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from autotune.core.errors import BadInput, IllegalConfiguration, UnknownName
from autotune.core.events import JobStarted, Listener, Predicting
from autotune.core.job import Job
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate
from autotune.core.units import format_bytes
from autotune.prediction.service import open_prediction_service
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import RequestSources, SettingName, setting_name

Number = int | float

GPUS = "gpus"  # name of the unknown that is no setting
# Their sum is at most the model's context
SOLVED_LENGTHS = ("max_completion_length", "max_prompt_length")
SMALL_VALUE = 64  # values below it are all tried
STEPS_PER_OCTAVE = 32  # values tried between a larger value and its double
LARGEST_TRIED = 2**20
SHARES = tuple(round(percent / 100, 2) for percent in range(1, 100))
"""Values of a setting that is a share, like `vllm_gpu_memory_utilization`."""

MAX_INTERPOLATIONS = 2
"""Values taken from a straight line before bisection: near the limit memory leaves the line."""

# Difference of two peaks, as a share, below which neither is larger: the allocator's rounding.
EQUAL_MEMORY = 0.01


@dataclass(frozen=True, kw_only=True)
class SolverAttempt:
    """Prediction, or the reason that there is none."""

    candidate: Candidate | None = None
    prediction: Prediction | None = None
    refusal: str | None = None

    @property
    def fits(self) -> bool | None:
        return False if self.prediction is None else self.prediction.fits


@dataclass(frozen=True, kw_only=True)
class Tried(SolverAttempt):
    """One value with its prediction, or the rule that refuses it."""

    value: Number
    job: Job | None = None


@dataclass(frozen=True, kw_only=True)
class FitCondition:
    """What the largest value has to meet."""

    holds: Callable[[Tried], bool]
    bytes_left: Callable[[Prediction], float]  # negative where the condition does not hold


SURELY_FITS = FitCondition(
    holds=lambda tried: tried.fits is True,
    bytes_left=lambda prediction: prediction.margin_bytes.low,
)
MAY_FIT = FitCondition(
    holds=lambda tried: tried.fits is not False,
    bytes_left=lambda prediction: prediction.margin_bytes.high,
)


@dataclass(frozen=True, kw_only=True)
class LargestValue:
    """Answer of `solve SETTING`."""

    setting: str
    requested: Number  # value of the request itself
    surely: Tried | None  # largest value whose whole interval is below the limit
    # Largest value whose interval contains the limit; None: `surely` is the largest
    possibly: Tried | None
    next: Tried | None  # smallest tried value above these; None: the largest value of all fits
    tried: tuple[Tried, ...]  # in order of the values


def find_largest_value(
    setting: str,
    sources: RequestSources,
    listener: Listener,
) -> tuple[Job, LargestValue]:
    """Return the job of the request itself, and the answer."""
    # 1. The request as it is.
    request = sources.parse(limit_prompts=True)
    candidate = candidate_of_job(request)
    name = setting_name(setting, request.trainer)
    start = _value_of(name.of_framework, setting, candidate, request)
    listener(
        JobStarted(
            job=request.job,
            candidates=(candidate,),
            assumed=request.assumed,
            notes=request.notes,
        )
    )

    # 2. The same with other values.
    with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:

        @cache
        def legal_request(value: Number) -> ParsedRequest | IllegalConfiguration:
            return _legal_request(sources, name, value)

        def is_legal(value: Number) -> bool:
            return not isinstance(legal_request(value), IllegalConfiguration)

        def predict(value: Number) -> Tried:
            changed = legal_request(value)
            if isinstance(changed, IllegalConfiguration):
                return Tried(value=value, refusal=changed.what)
            listener(Predicting(text=f"{name.of_framework}={value}"))
            candidate = candidate_of_job(changed)
            job = changed.job
            prediction = service.of(job).predict(candidate)
            return Tried(
                value=value,
                job=job,
                candidate=candidate,
                prediction=prediction,
            )

        search = LargestValueSearch(
            setting=name.of_framework,
            values=values_from(start, _context_bound(name.of_framework, candidate, request)),
            is_legal=is_legal,
            predict=predict,
        )
        return request.job, search.run(start)


def _value_of(
    name: str,
    typed: str,
    candidate: Candidate,
    request: ParsedRequest,
) -> Number:
    """Return the request's own value; BadInput if the setting is unknown or no number."""
    fields = request.trainer.fields()
    if name in candidate.settings:
        value: object = candidate.settings[name]
    elif name in fields:
        value = fields[name].default
    else:
        raise UnknownName("setting", typed, [*candidate.settings, *request.trainer.canonical, GPUS])
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        way_out = "Solve for a number, like max_completion_length."
        if value is None:
            way_out = "Give it a first value with --set."
        raise BadInput(f"{name} is {value!r:.60}, not a number above zero.", way_out=way_out)
    if isinstance(value, float) and value >= 1:
        raise BadInput(
            f"{name} is {value}, neither a whole number nor a share.",
            way_out="Solve for a whole number.",
        )
    return value


def _legal_request(
    sources: RequestSources,
    name: SettingName,
    value: Number,
) -> ParsedRequest | IllegalConfiguration:
    """Return the request with another value of the setting, or the refusal of its framework."""
    try:
        request = sources.with_value(name, value).parse(limit_prompts=True)
        candidate_of_job(request)
    except IllegalConfiguration as refusal:
        return refusal
    return request


def _context_bound(
    name: str,
    candidate: Candidate,
    request: ParsedRequest,
) -> int | None:
    """Return the largest length that the model's context holds; None: no length, or an unknown
    context.
    """
    config = request.job.task.workload.model.config
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config = text_config
    context = config.get("max_position_embeddings")
    lengths = [request.trainer.canonical.get(length) for length in SOLVED_LENGTHS]
    if name not in lengths or not isinstance(context, int):
        return None
    for other_length in lengths:
        if other_length is not None and other_length != name:
            length = candidate.settings.get(other_length)
            return max(1, context - length) if isinstance(length, int) else max(1, context)
    return max(1, context)


def values_from(start: Number, maximum: Number | None = None) -> tuple[Number, ...]:
    """Return the values among which is searched, ascending, `start` among them."""
    if isinstance(start, float):
        return tuple(sorted({*SHARES, start}))
    largest = min(maximum or LARGEST_TRIED, LARGEST_TRIED)
    values: set[Number] = {start, largest}
    values.update(value for value in range(1, SMALL_VALUE) if value <= largest)
    octave = SMALL_VALUE
    while octave <= LARGEST_TRIED:
        for step in range(STEPS_PER_OCTAVE):
            value = octave + step * octave // STEPS_PER_OCTAVE
            if value <= largest:
                values.add(value)
        octave *= 2
    return tuple(sorted(values))


@dataclass
class LargestValueSearch:
    """Search in an ascending list of values; every value is predicted once at most."""

    setting: str
    values: Sequence[Number]
    is_legal: Callable[[Number], bool]
    predict: Callable[[Number], Tried]
    _tried: dict[Number, Tried] = field(default_factory=dict)

    def run(self, start: Number) -> LargestValue:
        # 1. The largest value that surely fits, and from there the largest that may fit.
        surely = self._last(start, SURELY_FITS)
        from_here = start if surely is None else surely
        possibly = self._last(from_here, MAY_FIT)
        tried = tuple(self._tried[value] for value in sorted(self._tried))
        self._refuse_without_effect(tried)

        # 2. The first value above both.
        fitting = [value for value in (surely, possibly) if value is not None]
        above = tried
        if fitting:
            above = tuple(attempt for attempt in tried if attempt.value > max(fitting))
        return LargestValue(
            setting=self.setting,
            requested=start,
            surely=None if surely is None else self._tried[surely],
            possibly=None if possibly in (None, surely) else self._tried[possibly],
            next=above[0] if above else None,
            tried=tried,
        )

    def _last(self, start: Number, condition: FitCondition) -> Number | None:
        """Return the last value for which the condition holds; None: for none."""
        if not condition.holds(self._at(start)):
            return self._narrow(*self._halve_until(start, condition), condition)
        low, high = self._double_while(start, condition)
        return low if high is None else self._narrow(low, high, condition)

    def _double_while(self, low: Number, condition: FitCondition) -> tuple[Number, Number | None]:
        """Return a value for which the condition holds, and its double, for which it does not;
        None: it holds up to the largest value.
        """
        while True:
            double = self._double(low)
            if double == low:
                return low, None
            if not condition.holds(self._at(double)):
                return low, double
            low = double

    def _halve_until(self, start: Number, condition: FitCondition) -> tuple[Number | None, Number]:
        """Return a value for which the condition holds (None: for none), and the smallest known
        one above it for which it does not.
        """
        high = value = start
        while value > self.values[0]:
            value = self.values[max(bisect.bisect_right(self.values, value / 2) - 1, 0)]
            if condition.holds(self._at(value)):
                return value, high
            if self._at(value).refusal is None:
                high = value
        return None, high

    def _narrow(
        self,
        low: Number | None,
        high: Number,
        condition: FitCondition,
    ) -> Number | None:
        """Return the last legal value below `high` for which the condition holds, else `low`."""
        between = []
        for value in self.values:
            is_between = value < high and (low is None or value > low)
            if is_between and self.is_legal(value):
                between.append(value)
        below = 0
        above = len(between)
        guesses = 0
        while below < above:
            place = (below + above) // 2
            expected = self._interpolated(low, high, condition)
            if expected is not None and guesses < MAX_INTERPOLATIONS:
                guesses += 1
                last_expected = bisect.bisect_right(between, expected) - 1
                place = min(max(last_expected, below), above - 1)
            if condition.holds(self._at(between[place])):
                low = between[place]
                below = place + 1
            else:
                high = between[place]
                above = place
        return low

    def _interpolated(
        self,
        low: Number | None,
        high: Number,
        condition: FitCondition,
    ) -> float | None:
        """Return where no byte is left on a line through two values; None: no line leads there."""
        if low is None:
            return None
        lower = self._at(low).prediction
        upper = self._at(high).prediction
        if lower is None or upper is None:
            return None
        left_at_low = condition.bytes_left(lower)
        left_at_high = condition.bytes_left(upper)
        if left_at_low <= 0 or left_at_high >= 0:
            return None
        return low + (high - low) * left_at_low / (left_at_low - left_at_high)

    def _double(self, value: Number) -> Number:
        """Return the first legal value from twice the value on; twice the value itself if none
        of the next two octaves is legal; the value itself at the end of the list.
        """
        first = min(bisect.bisect_left(self.values, 2 * value), len(self.values) - 1)
        last = bisect.bisect_right(self.values, 8 * value)
        for larger in self.values[first:last]:
            if self.is_legal(larger):
                return larger
        return self.values[first]

    def _at(self, value: Number) -> Tried:
        if value not in self._tried:
            self._tried[value] = self.predict(value)
            self._refuse_falling()
        return self._tried[value]

    def _refuse_falling(self) -> None:
        """Refuse a setting of which a larger value takes less memory."""
        predictions = []
        for value, attempt in sorted(self._tried.items()):
            if attempt.prediction is not None:
                predictions.append((value, attempt.prediction))
        for (low, before), (high, after) in pairwise(predictions):
            allocated = before.torch_peak_allocated_bytes.value
            peak = before.peak_memory_bytes.value
            next_peak = after.peak_memory_bytes.value
            allocates_less = after.torch_peak_allocated_bytes.value < allocated
            if allocates_less and next_peak < peak * (1 - EQUAL_MEMORY):
                raise BadInput(
                    f"{self.setting}: a larger value takes less memory ({format_bytes(peak)} at"
                    f" {low}, {format_bytes(next_peak)} at {high}), so there is no largest one.",
                    way_out=(
                        "Solve for a setting that takes more memory as it grows, like"
                        " max_completion_length."
                    ),
                )

    def _refuse_without_effect(self, tried: Sequence[Tried]) -> None:
        """Refuse a setting that changes nothing in memory."""
        values = []
        peaks = set()
        for attempt in tried:
            if attempt.prediction is not None:
                values.append(attempt.value)
                peaks.add(attempt.prediction.peak_memory_bytes.value)
        if len(values) > 1 and len(peaks) == 1:
            raise BadInput(
                f"{self.setting}: without effect on memory from {values[0]} to {values[-1]}.",
                way_out="Solve for a setting that takes memory, like max_completion_length.",
            )


# Output.

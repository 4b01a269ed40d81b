"""Largest value of one setting that fits, by bisection over predictions.

Allocated memory must not fall where the value rises, which is checked on every pair of predictions.
Reserved memory may, by a few percent: torch frees its cache near the limit. An interval gives two
answers: the largest value that surely fits, and the largest one that may fit.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from autotune.core.errors import BadInput, IllegalConfiguration, UnknownName
from autotune.core.events import JobStarted, Listener, Predicting
from autotune.core.job import Job
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, setting_text
from autotune.core.units import format_bytes
from autotune.prediction.service import open_prediction_service
from autotune.report.document_rows import interval, job_row, prediction_row
from autotune.request.assignments import FLAG_OF_SETTING, parse_holds
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request

Number = int | float

GPUS = "gpus"  # name of the unknown that is no setting
LENGTHS = (
    "max_completion_length",
    "max_prompt_length",
)  # autotune's names of the lengths whose sum the model's context bounds
STEPS_PER_OCTAVE = (
    32  # values tried between a value above 64 and its double; below 64, every whole number
)
LARGEST_TRIED = 2**20
SHARES = tuple(round(step / 100, 2) for step in range(1, 100))
"""Values of a setting that is a share, like `vllm_gpu_memory_utilization`."""

# difference of two peaks, as a share, below which neither is larger: the allocator's rounding
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
class LargestValue:
    """Answer of `solve SETTING`."""

    setting: str
    given: Number  # value of the request itself
    surely: Tried | None  # largest value whose whole interval is below the limit
    possibly: (
        Tried | None
    )  # largest value whose interval contains the limit; None: `surely` is the largest
    next: Tried | None  # smallest tried value above these; None: the largest value of all fits
    tried: tuple[Tried, ...]  # in order of the values


def find_largest_value(setting: str, flags: Flags, listener: Listener) -> tuple[Job, LargestValue]:
    """Return the job of the request itself, and the answer."""
    request = parse_request(flags, limit_prompts=True)
    base = candidate_of_job(request)
    name, flag = _framework_name(setting, request)
    given = _number(name, setting, base, request)
    listener(
        JobStarted(
            job=request.job, candidates=(base,), assumed=request.assumed, notes=request.notes
        )
    )
    with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:

        def legal(value: Number) -> bool:
            return _with_value(flags, name, flag, value)[1] is None

        def predict(value: Number) -> Tried:
            at, refusal = _with_value(flags, name, flag, value)
            if at is None:
                return Tried(value=value, refusal=refusal)
            listener(Predicting(text=f"{name}={value}"))
            candidate = candidate_of_job(at)
            return Tried(
                value=value,
                job=at.job,
                candidate=candidate,
                prediction=service.of(at.job).predict(candidate),
            )

        values = values_from(given, _context_bound(name, base, request))
        found = LargestValueSearch(
            setting=name, values=values, is_legal=legal, predict=predict
        ).run(given)
    return request.job, found


def _number(name: str, setting: str, base: Candidate, request: ParsedRequest) -> Number:
    """Return the request's own value; BadInput if the setting is unknown or no number."""
    known = {
        **{field: one.default for field, one in request.trainer.fields().items()},
        **base.settings,
    }
    if name not in known:
        raise UnknownName("setting", setting, [*base.settings, *request.trainer.canonical, GPUS])
    value = known[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        fix = (
            "Give it a first value with --set."
            if value is None
            else "Solve for a number, like max_completion_length."
        )
        raise BadInput(f"{name} is {value!r:.60}, not a number above zero.", way_out=fix)
    if isinstance(value, float) and value >= 1:
        raise BadInput(
            f"{name} is {value}, neither a whole number nor a share.",
            way_out="Solve for a whole number.",
        )
    return value


def _framework_name(setting: str, request: ParsedRequest) -> tuple[str, str | None]:
    """Return the framework's name of a setting, and autotune's flag for it where there is one."""
    canonical = request.trainer.canonical
    by_flag = {flag: own for own, flag in FLAG_OF_SETTING.items()}
    own = by_flag.get(setting, setting)
    own = next((one for one, name in canonical.items() if name == own), own)
    return canonical.get(own, own), FLAG_OF_SETTING.get(own) if own in canonical else None


def _with_value(
    flags: Flags, name: str, flag: str | None, value: Number
) -> tuple[ParsedRequest | None, str | None]:
    """Return the request with this value, or the rule that refuses it."""
    set_, hold = (
        [text for text in texts if name not in parse_holds([text])]
        for texts in (flags.set, flags.hold)
    )
    given = {flag: value} if flag else {}
    try:
        at = flags.replace(
            hold=tuple(hold), set=(*set_, *([] if flag else [f"{name}={value}"])), **given
        )
        request = parse_request(at, limit_prompts=True)
        candidate_of_job(request)
    except IllegalConfiguration as error:
        return None, error.what
    return request, None


def _context_bound(name: str, base: Candidate, request: ParsedRequest) -> int | None:
    """Return the largest length that the model's context holds; None: no length, or an unknown
    context.
    """
    config = request.job.task.workload.model.config
    inner = config.get("text_config")
    context = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    own = [request.trainer.canonical.get(length) for length in LENGTHS]
    if name not in own or not isinstance(context, int):
        return None
    other = base.settings.get(next((one for one in own if one is not None and one != name), ""))
    return max(1, context - (other if isinstance(other, int) else 0))


def values_from(start: Number, most: Number | None = None) -> tuple[Number, ...]:
    """Return the values among which is searched, ascending, `start` among them."""
    if isinstance(start, float):
        return tuple(sorted({*SHARES, start}))
    top = min(most or LARGEST_TRIED, LARGEST_TRIED)
    octaves = [2**power for power in range(6, LARGEST_TRIED.bit_length())]
    coarse = {
        octave + step * octave // STEPS_PER_OCTAVE
        for octave in octaves
        for step in range(STEPS_PER_OCTAVE)
    }
    return tuple(
        sorted({start, top, *(value for value in (*range(1, 64), *coarse) if value <= top)})
    )


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
        possibly = self._last(
            given if surely is None else surely, lambda tried: tried.fits is not False
        )
        tried = tuple(self._known[value] for value in sorted(self._known))
        peaks = [
            (one.value, one.prediction.peak_memory_bytes.value)
            for one in tried
            if one.prediction is not None
        ]
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
        between = [
            value
            for value in self.values
            if (low is None or value > low) and value < high and self.is_legal(value)
        ]
        below, above = 0, len(between)
        while below < above:
            middle = (below + above) // 2
            if holds(self._at(between[middle])):
                low, below = between[middle], middle + 1
            else:
                above = middle
        return low

    def _double(self, value: Number) -> Number:
        """Return the first legal value from twice the value on; twice the value itself if none
        of the next two octaves is legal; the value itself at the end of the list.
        """
        first = min(bisect.bisect_left(self.values, 2 * value), len(self.values) - 1)
        last = bisect.bisect_right(self.values, 8 * value)
        return next(
            (one for one in self.values[first:last] if self.is_legal(one)), self.values[first]
        )

    def _at(self, value: Number) -> Tried:
        if value not in self._known:
            self._known[value] = self.predict(value)
            self._refuse_falling()
        return self._known[value]

    def _refuse_falling(self) -> None:
        peaks = [
            (value, tried.prediction)
            for value, tried in sorted(self._known.items())
            if tried.prediction is not None
        ]
        for (low, before), (high, after) in pairwise(peaks):
            smaller, larger = before.peak_memory_bytes.value, after.peak_memory_bytes.value
            needs_less = (
                after.torch_peak_allocated_bytes.value < before.torch_peak_allocated_bytes.value
            )
            if needs_less and larger < smaller * (1 - EQUAL_MEMORY):
                raise BadInput(
                    f"{self.setting}: a larger value takes less memory ({format_bytes(smaller)} at"
                    f" {low}, {format_bytes(larger)} at {high}), so there is no largest one.",
                    way_out=(
                        "Solve for a setting that takes more memory as it grows, like"
                        " max_completion_length."
                    ),
                )


# Output.

SCHEMA = 1


def value_document(job: Job, found: LargestValue) -> dict[str, Any]:
    """Return the document of a setting."""
    status = "ok" if found.surely else "undecided" if found.possibly else "nothing_fits"
    best = found.surely or found.possibly
    return {
        "schema": SCHEMA,
        "status": status,
        "basis": "predicted",
        "setting": found.setting,
        "given": found.given,
        "surely_fits": found.surely and found.surely.value,
        "may_fit": found.possibly and found.possibly.value,
        "next": found.next and _tried(found.next),
        "prediction": best and best.prediction and prediction_row(best.prediction),
        "settings": dict(best.candidate.settings) if best and best.candidate else None,
        "tried": [_tried(one) for one in found.tried],
        "question": job_row(job),
    }


def _tried(one: Tried) -> dict[str, Any]:
    prediction = one.prediction
    return {
        "value": one.value,
        "fits": one.fits,
        "peak_memory_bytes": prediction and interval(prediction.peak_memory_bytes),
        "margin_bytes": prediction and interval(prediction.margin_bytes),
        "refused_because": one.refusal,
    }


def value_lines(found: LargestValue) -> Iterator[str]:
    """Yield the answer for a setting."""
    yield "Predicted, nothing was measured."
    if found.surely is not None and found.surely.prediction is not None:
        yield (
            f"{found.setting}={found.surely.value} surely fits:"
            f" {margin_text(found.surely.prediction)}"
        )
    else:
        yield f"No value of {found.setting} surely fits, with the other settings as they are."
    if found.possibly is not None and found.possibly.prediction is not None:
        yield (
            f"{found.setting}={found.possibly.value} may fit:"
            f" {margin_text(found.possibly.prediction)}"
        )
    if found.next is None:
        yield f"{found.tried[-1].value} is the largest value that was considered."
    elif found.next.refusal is not None:
        yield f"{found.setting}={found.next.value} is refused: {found.next.refusal}"
    elif found.next.prediction is not None:
        yield (
            f"{found.setting}={found.next.value} does not fit: {margin_text(found.next.prediction)}"
        )
    yield (
        f"As requested: {found.setting}={setting_text(found.given)}. {len(found.tried)} values were"
        " tried."
    )


def margin_text(prediction: Prediction) -> str:
    peak, margin = prediction.peak_memory_bytes, prediction.margin_bytes
    need = f"{format_bytes(peak.value)} ({format_bytes(peak.low)} to {format_bytes(peak.high)}) of "
    need += format_bytes(prediction.limit_bytes)
    return f"{need}, at least {format_bytes(margin.low)} left" if prediction.fits else need

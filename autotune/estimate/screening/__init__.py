"""Screening: all points of a space from a few short traces.

Inside a family, a step is a function of the point (batch and lengths). Each allocation size is a
short formula of the point (`formulas`), and a long model's events are those of a short model with
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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.core.errors import BadInput
from autotune.core.measurement import Phase
from autotune.core.space import fingerprint
from autotune.core.trace import Trace
from autotune.estimate.model_shape import shape, text_config
from autotune.estimate.replay import StepStage
from autotune.estimate.screening.blocks import (
    Integers,
    LayerRepetition,
    NotUniform,
    Point,
    Sample,
    rows_of,
)
from autotune.estimate.screening.formulas import SizeModel
from autotune.estimate.screening.stretching import StretchedTrace, stretched
from autotune.estimate.screening.work_model import WorkModel, fit_work
from autotune.estimate.trace_context import PredictionInput, TraceContext

TracePoint = Callable[[Point, int | None], Trace]  # traces a point in a number of layers; None: all

MAX_ERROR = 0.002  # relative error at the check up to which no more points are traced
MAX_USABLE_ERROR = (
    0.05  # error beyond which the family has no model, and each point is traced alone
)
MAX_PERIOD = 8  # longest pattern of layers: Gemma 3 repeats after six

SHARES = (
    (0.0, 0.0, 0.0),
    (1.0, 0.17, 1.0),
    (0.5, 1.0, 0.1),
    (1.0, 0.6, 0.45),
    (0.0, 1.0, 0.8),
    (0.6, 0.3, 1.0),
    (0.0, 0.3, 0.5),
    (0.3, 0.8, 0.6),
)
"""Positions between smallest and largest batch, prompt and completion: irregular, so that terms
differ. The last two are reserves."""

FEWEST_MICRO_STEPS = (3, 3, 4, 5, 4, 3, 3, 5)
"""Micro-steps at each of SHARES. Beyond three they repeat; a generation's bytes grow linearly."""

GRID = 8  # multiple of lengths in between, as attention masks are aligned
MAX_BATCHES = (
    3  # number of micro-batches above which only the check traces the largest: it takes longest
)
REFERENCE_SHARES = (0, 2)  # indices of SHARES that suffice with the formulas of a reference family


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """The steps of a family as a function of the point."""

    long: StretchedTrace  # the full model's trace at the first point traced
    sizes: SizeModel
    work: WorkModel
    residual: float  # largest relative error at the check trace

    @property
    def trace(self) -> Trace:
        return self.long.trace

    def at(self, points: Sequence[Point]) -> list[Integers]:
        """Return the sizes of the long trace's allocations, at each point."""
        return [self.long.sizes_of(own) for own in self.sizes.at(points)]


def repetition_of(config: Mapping[str, object]) -> LayerRepetition | None:
    """Return the shortest model that determines this one; None without a pattern of layers."""
    text = text_config(config)
    count, named = text.get("num_hidden_layers"), text.get("layer_types")
    types: Sequence[object] = (
        named if isinstance(named, Sequence) and not isinstance(named, str) else ()
    )
    kinds: list[object]  # an entry per layer; equal entries are equal layers
    try:
        kinds = (
            list(zip(shape(config).layers, types, strict=True))
            if types
            else list(shape(config).layers)
        )
    except BadInput:  # unknown architecture: the traces will show whether its layers are alike
        kinds = list(types) or [None] * (count if isinstance(count, int) else 0)
    for period in range(1, MAX_PERIOD + 1):
        for head in (1, 2, 3, 4):
            if all(
                kinds[place] == kinds[place + period] for place in range(head, len(kinds) - period)
            ):
                least = head + period + 1
                layers = least + (len(kinds) - least) % period
                if layers + period <= len(kinds):
                    return LayerRepetition(
                        layers=layers,
                        first=head,
                        period=period,
                        copies=(len(kinds) - layers) // period,
                    )
    return None


def survey(
    trace: TracePoint,
    points: Sequence[Point],
    repetition: LayerRepetition | None,
    reference: StepModel | None = None,
    batches: Sequence[int] = (),
) -> StepModel:
    """Trace a few points and return the model of all. NotUniform if no model fits.

    `reference`: model of another family; then fewer points are traced first, at any of its
    micro-batches `batches`, and more only if the check requires them.
    """
    plan = repetition or LayerRepetition(layers=0, first=0, period=1, copies=0)
    once = replace(plan, copies=1 if repetition else 0)
    first = initial_traces(points, repetition, batches if reference else None)
    traced = {look: Sample(point=look[0], trace=trace(*look)) for look in dict.fromkeys(first)}
    *samples, check = (traced[look] for look in first)
    short, longer_trace = samples[0].trace, samples.pop().trace if repetition else None
    # A point at which loops are not full, the far corner, and one in the middle.
    low, middle = (_between(points, at) for at in (len(SHARES) - 2, len(SHARES) - 1))
    extra = [low, corner(points)._replace(micro_steps=_micro_steps(points, 0)), middle]
    more = [*(picked_points(points) if reference else ()), *extra]
    more = [point for point in more if point not in {one.point for one in samples}]
    checked = stretched(short, longer_trace, replace(plan, copies=0) if reference else once)
    while True:
        # Most formulas of sizes occur again in other families of the same model.
        sizes = SizeModel(samples, reference.sizes.formulas if reference else None)
        error = error_at(checked, sizes, check)
        if error <= MAX_ERROR or not more:
            break
        point = more.pop(0)
        samples.append(Sample(point=point, trace=trace(point, first[0][1])))
    if error > MAX_USABLE_ERROR:
        raise NotUniform(f"the check is off by {error:.0%}")
    loops, known = sizes.formulas.basis.terms, reference.work if reference else None
    work = fit_work(samples, longer_trace, check if reference else None, plan, known, loops)
    return StepModel(
        long=stretched(short, longer_trace, plan), sizes=sizes, work=work, residual=error
    )


def error_at(long: StretchedTrace, sizes: SizeModel, sample: Sample) -> float:
    """Return the largest error of a phase's peak, relative to the highest peak."""
    predicted, traced = (
        phase_peaks(long.trace, long.sizes_of(sizes.at([sample.point])[0])),
        phase_peaks(sample.trace),
    )
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
            peaks[mark.phase] = max(
                int(live[span.start : span.stop + 1].max()), peaks.get(mark.phase, 0)
            )
    return peaks


def initial_traces(
    points: Sequence[Point], repetition: LayerRepetition | None, batches: Sequence[int] | None
) -> list[tuple[Point, int | None]]:
    """Return point and depth of the first traces: points of the short model, one of the longer
    model, the far corner.

    The corner is traced in the longer model too, except with a reference (`batches` is not None):
    the reference has shown that all layers grow alike.
    """
    chosen = picked_points(points)
    if batches is not None and len(set(points)) > len(REFERENCE_SHARES):
        # Two points that differ in everything, at small micro-batches.
        known = sorted({point.micro_batch for point in points} | set(batches))
        small = known[:-1] if len(known) > MAX_BATCHES else known
        between = (
            _between(points, at)._replace(micro_batch=_share(small, SHARES[at][0], 1))
            for at in REFERENCE_SHARES
        )
        chosen = list(dict.fromkeys(between))
    short = repetition.layers if repetition else None
    above = repetition.layers + repetition.period if repetition else None
    longer = [(chosen[0], above)] if repetition else []
    return [
        *((point, short) for point in chosen),
        *longer,
        (corner(points), above if batches is None else short),
    ]


def picked_points(points: Sequence[Point]) -> list[Point]:
    """Return the points to trace without a reference; at most two are taken as they are."""
    distinct = list(dict.fromkeys(points))
    return (
        distinct
        if len(distinct) <= 2
        else list(dict.fromkeys(_between(points, at) for at in range(len(SHARES) - 2)))
    )


def corner(points: Sequence[Point]) -> Point:
    """Return the largest of everything, where an error is largest."""
    micro_steps = sorted({point.micro_steps for point in points})
    largest = Point(*map(max, zip(*points, strict=True)))
    return largest._replace(
        micro_steps=micro_steps[0] if len(micro_steps) == 1 else max(6, micro_steps[0])
    )


def _between(points: Sequence[Point], at: int) -> Point:
    batches, prompts, completions, _ = zip(*points, strict=True)
    batch, prompt, completion = SHARES[at]
    lengths = _share(prompts, prompt, GRID), _share(completions, completion, GRID)
    return Point(_share(batches, batch, 1), *lengths, _micro_steps(points, at))


def _micro_steps(points: Sequence[Point], at: int) -> int:
    values = {point.micro_steps for point in points}
    return values.pop() if len(values) == 1 else FEWEST_MICRO_STEPS[at]


def _share(values: Sequence[int], share: float, grid: int) -> int:
    least, most = min(values), max(values)
    between = round((least + share * (most - least)) / grid) * grid
    return least if share == 0 else most if share == 1 else min(most, max(least, between))


# A family's sharded step at each point.


class Family:
    """The step model of a family, sharded over its ranks."""

    def __init__(
        self, points: Sequence[Point], model: StepModel, rank: PredictionInput, stage: StepStage
    ) -> None:
        """`rank`: the one that reserves most at the first point, whose step in a context is
        `stage`; a sharding library adds the same at every point.
        """
        self.points, self.model, self.rank = list(points), model, rank
        self._added = np.array(rank.trace.sizes[len(model.trace.sizes) :], dtype=np.int64)
        events = np.array(model.trace.events, dtype=np.int64)
        self._signs, self._numbers = np.sign(events), np.abs(events) - 1
        self._stages = [stage]

    def covers(self, points: Sequence[Point]) -> bool:
        """Return True if the points are within the range of the model."""
        known, asked = zip(*self.points, strict=True), zip(*points, strict=True)
        return all(
            min(ours) <= min(theirs) and max(theirs) <= max(ours)
            for ours, theirs in zip(known, asked, strict=True)
        )

    def traces(self, points: Sequence[Point]) -> Iterator[tuple[Point, Trace, Integers]]:
        """Yield each point's trace and sizes; those in the trace are the first point's."""
        work, extra = self.model.work.at(rows_of(points)), self.model.sizes.high_extra_bytes(points)
        residual = self.model.residual
        for point, own_work, more in zip(points, work, extra, strict=True):
            (sizes,) = self.model.at([point])
            margin = (
                round(residual * int(np.cumsum(self._signs * sizes[self._numbers]).max()))
                if residual
                else 0
            )
            trace = replace(
                self.rank.trace, work=own_work, high_extra_bytes=more, derived_error_bytes=margin
            )
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


# Trace requests as points of a family.

Request = Mapping[str, Any]

POINT_SETTINGS = frozenset(
    {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "max_completion_length",
        "max_length",
        "num_generations",
    }
)
"""Settings that vary inside a family (the group size changes a few numbers per prompt)."""

WHOLE_WEIGHTS = (
    "zero1",
    "zero2",
)  # stages of ZeRO that leave the modules unchanged; under the third they save other tensors


def family_key(request: Request) -> str:
    """Return a fingerprint of everything but the point, with the class of its micro-steps: 1, 2
    or 3 (more). Points of one class have the same events.
    """
    settings = request["settings"]
    accumulation, steps = (
        settings.get("gradient_accumulation_steps"),
        settings.get("steps_per_generation"),
    )
    stale = None if steps in (None, accumulation) else (accumulation, steps)
    fixed = {name: value for name, value in settings.items() if name not in POINT_SETTINGS}
    rest = {name: value for name, value in request.items() if name not in ("settings", "lengths")}
    return fingerprint(
        {**rest, "settings": fixed, "course": min(point_of(request).micro_steps, 3), "stale": stale}
    )


def traced_request(request: Request) -> Request:
    """Return the request to trace: ZeRO's buckets, shards and offloading are added afterwards."""
    sharding = request["sharding"]
    if sharding["kind"] not in (*WHOLE_WEIGHTS, "zero3"):
        return request
    kind = WHOLE_WEIGHTS[-1] if sharding["kind"] in WHOLE_WEIGHTS else "zero3"
    return {**request, "sharding": {"kind": kind, "ranks": sharding["ranks"]}}


def point_of(request: Request) -> Point:
    settings, lengths = request["settings"], request["lengths"]
    return Point(
        micro_batch=settings["per_device_train_batch_size"],
        prompt=lengths["prompt"],
        completion=lengths["completion"],
        micro_steps=settings.get("steps_per_generation")
        or settings.get("gradient_accumulation_steps")
        or 1,
    )


def request_at(request: Request, point: Point, layers: int | None) -> Request:
    """Return the request at another point."""
    settings = dict(request["settings"])
    before = settings.get("steps_per_generation")
    settings["per_device_train_batch_size"] = point.micro_batch
    if before in (None, settings.get("gradient_accumulation_steps")):
        settings["gradient_accumulation_steps"] = point.micro_steps
    if before is not None:
        settings["steps_per_generation"] = point.micro_steps
    if "max_completion_length" in settings:
        settings["max_completion_length"] = point.completion
    if "max_length" in settings:
        settings["max_length"] = point.prompt + point.completion
    if "num_generations" in settings:
        # The requested group size if it divides the generation batch, else the smallest divisor.
        batch, wanted = (
            point.micro_batch * point.micro_steps * request["sharding"]["ranks"],
            settings["num_generations"],
        )
        sizes = (wanted, *range(2, batch + 1))
        settings["num_generations"] = next((size for size in sizes if batch % size == 0), wanted)
    lengths = {**request["lengths"], "prompt": point.prompt, "completion": point.completion}
    return {
        **request,
        "settings": settings,
        "lengths": lengths,
        "model": {**request["model"], "layers": layers},
    }

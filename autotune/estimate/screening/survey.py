"""Survey of a family: few points in short models, from which a model of all is fitted, and a check at the far corner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autotune.core.errors import BadInput
from autotune.core.trace import Trace
from autotune.estimate.model_shape import shape, text_config
from autotune.estimate.screening import StepModel, StepModelFit
from autotune.estimate.screening.blocks import NotUniform, Point, Sample
from autotune.estimate.screening.layer_growth import LayerRepetition

TracePoint = Callable[[Point, int | None], Trace]  # traces a point in a number of layers; None: all
MAX_ERROR = 0.002  # relative error at the check up to which no more points are traced
MAX_USABLE_ERROR = 0.05  # error beyond which the family has no model, and each point is traced alone
MAX_PERIOD = 8  # longest pattern of layers: Gemma 3 repeats after six
SHARES = (
    (0.0, 0.0, 0.0), (1.0, 0.17, 1.0), (0.5, 1.0, 0.1), (1.0, 0.6, 0.45), (0.0, 1.0, 0.8), (0.6, 0.3, 1.0),
    (0.0, 0.3, 0.5), (0.3, 0.8, 0.6),
)  # fmt: skip
"""Positions between smallest and largest batch, prompt and completion: irregular, so that terms
differ. The last two are reserves."""

FEWEST_MICRO_STEPS = (3, 3, 4, 5, 4, 3, 3, 5)
"""Micro-steps at each of SHARES. Beyond three they repeat; a generation's bytes grow linearly."""

GRID = 8  # multiple of lengths in between, as attention masks are aligned
MAX_BATCHES = 3  # number of micro-batches above which only the check traces the largest: it takes longest
REFERENCE_SHARES = (0, 2)  # indices of SHARES that suffice with the formulas of a reference family


def micro_step_class(micro_steps: int) -> int:
    """Return 1, 2 or 3 (more): points of one class have the same events."""
    return min(micro_steps, 3)


def repetition_of(config: Mapping[str, object]) -> LayerRepetition | None:
    """Return the shortest model that determines this one; None without a pattern of layers."""
    text = text_config(config)
    count, named = text.get("num_hidden_layers"), text.get("layer_types")
    types: Sequence[object] = named if isinstance(named, Sequence) and not isinstance(named, str) else ()
    kinds: list[object]  # an entry per layer; equal entries are equal layers
    try:
        kinds = list(zip(shape(config).layers, types, strict=True)) if types else list(shape(config).layers)
    except BadInput:  # unknown architecture: the traces will show whether its layers are alike
        kinds = list(types) or [None] * (count if isinstance(count, int) else 0)
    for period in range(1, MAX_PERIOD + 1):
        for head in (1, 2, 3, 4):
            if all(kinds[place] == kinds[place + period] for place in range(head, len(kinds) - period)):
                least = head + period + 1
                layers = least + (len(kinds) - least) % period
                if layers + period <= len(kinds):
                    return LayerRepetition(layers=layers, first=head, period=period, copies=(len(kinds) - layers) // period)
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
    longer = samples.pop() if repetition else None
    # A point at which loops are not full, the far corner, and one in the middle.
    low, middle = (_between(points, at) for at in (len(SHARES) - 2, len(SHARES) - 1))
    extra = [low, replace(corner(points), micro_steps=_micro_steps(points, 0)), middle]
    more = [*(picked_points(points) if reference else ()), *extra]
    more = [point for point in more if point not in {one.point for one in samples}]
    while True:
        fit = StepModelFit(samples, None if longer is None else longer.trace, reference)
        error = fit.error_at(replace(plan, copies=0) if reference else once, check)
        if error <= MAX_ERROR or not more:
            break
        point = more.pop(0)
        samples.append(Sample(point=point, trace=trace(point, first[0][1])))
    if error > MAX_USABLE_ERROR:
        raise NotUniform(f"the check is off by {error:.0%}")
    return replace(fit.model(plan, check if reference else None), residual=error)


def initial_traces(
    points: Sequence[Point], repetition: LayerRepetition | None, batches: Sequence[int] | None
) -> list[tuple[Point, int | None]]:
    """Return point and depth of the first traces: points of the short model, one of the longer model, the far corner.

    The corner is traced in the longer model too, except with a reference (`batches` is not None):
    the reference has shown that all layers grow alike.
    """
    chosen = picked_points(points)
    if batches is not None and len(set(points)) > len(REFERENCE_SHARES):
        # Two points that differ in everything, at small micro-batches.
        known = sorted({point.micro_batch for point in points} | set(batches))
        small = known[:-1] if len(known) > MAX_BATCHES else known
        between = [replace(_between(points, at), micro_batch=_share(small, SHARES[at][0], 1)) for at in REFERENCE_SHARES]
        chosen = list(dict.fromkeys(between))
    short = repetition.layers if repetition else None
    above = repetition.layers + repetition.period if repetition else None
    longer = [(chosen[0], above)] if repetition else []
    return [*((point, short) for point in chosen), *longer, (corner(points), above if batches is None else short)]


def picked_points(points: Sequence[Point]) -> list[Point]:
    """Return the points to trace without a reference; at most two are taken as they are."""
    distinct = list(dict.fromkeys(points))
    return distinct if len(distinct) <= 2 else list(dict.fromkeys(_between(points, at) for at in range(len(SHARES) - 2)))


def corner(points: Sequence[Point]) -> Point:
    """Return the largest of everything, where an error is largest."""
    micro_steps = sorted({point.micro_steps for point in points})
    return Point(
        micro_batch=max(point.micro_batch for point in points),
        prompt=max(point.prompt for point in points),
        completion=max(point.completion for point in points),
        micro_steps=micro_steps[0] if len(micro_steps) == 1 else max(6, micro_steps[0]),
    )


def _between(points: Sequence[Point], at: int) -> Point:
    batch, prompt, completion = SHARES[at]
    return Point(
        micro_batch=_share([point.micro_batch for point in points], batch, 1),
        prompt=_share([point.prompt for point in points], prompt, GRID),
        completion=_share([point.completion for point in points], completion, GRID),
        micro_steps=_micro_steps(points, at),
    )


def _micro_steps(points: Sequence[Point], at: int) -> int:
    values = {point.micro_steps for point in points}
    return values.pop() if len(values) == 1 else FEWEST_MICRO_STEPS[at]


def _share(values: Sequence[int], share: float, grid: int) -> int:
    least, most = min(values), max(values)
    between = round((least + share * (most - least)) / grid) * grid
    return least if share == 0 else most if share == 1 else min(most, max(least, between))

"""Where to trace so that a whole space follows: few points, short models, and a check at the far corner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autotune.errors import BadInput
from autotune.predict.pieces import Learnt, Pieces
from autotune.predict.pieces.blocks import NotUniform, Stretch
from autotune.predict.pieces.points import Point, Sample
from autotune.predict.shapes import shape, text_config
from autotune.trace import Trace

Follow = Callable[[Point, int | None], Trace]
"""Traces a point, with so many layers; None is all."""

TOLERANCE = 0.002
"""Relative error at the check from which on more points are traced."""

LARGEST_ERROR = 0.05
"""Beyond it nothing follows from what was looked at: then each point is to be traced by itself."""

ROUNDS = 3
"""How often points are added before the error is told instead."""

LONGEST_PERIOD = 8
"""Of a pattern of layers: Gemma 3 repeats after six."""

SHARES = (
    (0.0, 0.0, 0.0), (1.0, 0.17, 1.0), (0.5, 1.0, 0.1), (1.0, 0.6, 0.45), (0.0, 1.0, 0.8), (0.6, 0.3, 1.0),
    (0.0, 0.3, 0.5), (0.3, 0.8, 0.6),
)  # fmt: skip
"""Of the way from the least to the most batch, prompt and completion: irregular, so that no two terms look alike. The last two
are for where the others do not suffice."""

FEWEST_MICRO_STEPS = (3, 3, 4, 5, 4, 3, 3, 5)
"""Beyond three, micro-steps repeat each other, and what a generation holds grows with each by the same."""

GRID = 8
"""Lengths in between are multiples of it, as the masks of attention kernels are laid out."""


MOST_BATCHES = 3
"""Of so many micro-batches the largest is left to the check: following it takes longest."""

FEW_LOOKS = (0, 2)
"""Of the shares, where another family's sums are known."""


def course_of(micro_steps: int) -> int:
    """Points of one course have the same events: one micro-step, two, or more."""
    return min(micro_steps, 3)


def stretch_of(config: Mapping[str, object]) -> Stretch | None:
    """The shortest model from which this one's length follows; None where its layers follow no pattern, or are too few."""
    kinds = _kinds(config)
    for period in range(1, LONGEST_PERIOD + 1):
        for head in (1, 2, 3, 4):
            if all(kinds[place] == kinds[place + period] for place in range(head, len(kinds) - period)):
                least = head + period + 1
                layers = least + (len(kinds) - least) % period
                if layers + period <= len(kinds):
                    return Stretch(layers=layers, first=head, period=period, copies=(len(kinds) - layers) // period)
    return None


def survey(
    follow: Follow, points: Sequence[Point], stretch: Stretch | None, lent: Pieces | None = None, batches: Sequence[int] = ()
) -> Pieces:
    """Pieces for these points. NotUniform where they cannot be had: then each point is to be traced by itself.

    `lent` are those of another family of the same model; then fewer points are looked at first, and more only where the check
    shows that it takes them. They may lie at any of the micro-batches at which the other family is known, its `batches`.
    """
    plan = stretch or Stretch(layers=0, first=0, period=1, copies=0)
    once = replace(plan, copies=1 if stretch else 0)
    first = looks(points, stretch, batches if lent else None)
    once_each = {look: Sample(point=look[0], trace=follow(*look)) for look in dict.fromkeys(first)}
    *samples, check = (once_each[look] for look in first)
    longer = samples.pop() if stretch else None
    more = [point for point in later_looks(points, lent=lent is not None) if point not in {one.point for one in samples}]
    while True:
        learnt = Learnt(samples, None if longer is None else longer.trace, lent)
        error = learnt.error_at(replace(plan, copies=0) if lent else once, check)
        if error <= TOLERANCE or not more:
            break
        point = more.pop(0)
        samples.append(Sample(point=point, trace=follow(point, first[0][1])))
    if error > LARGEST_ERROR:
        raise NotUniform(f"at the check it is {error:.0%} off")
    return replace(learnt.pieces(plan, check if lent else None), residual=error)


def looks(points: Sequence[Point], stretch: Stretch | None, batches: Sequence[int] | None) -> list[tuple[Point, int | None]]:
    """What is traced first: points of the short model; of the next longer one the first of them; and the far corner.

    The corner in the longer model too, except where sums are lent: that all layers grow with the batch alike was seen then.
    Where there are no more points than a borrower looks at, it looks at those themselves.
    """
    few = batches is not None and len(set(points)) > len(FEW_LOOKS)
    picks = _few(points, batches or ()) if few else picked(points)
    short = stretch.layers if stretch else None
    above = stretch.layers + stretch.period if stretch else None
    longer = [(picks[0], above)] if stretch else []
    return [*((point, short) for point in picks), *longer, (corner(points), above if batches is None else short)]


def later_looks(points: Sequence[Point], *, lent: bool) -> list[Point]:
    """Points that are added, one by one, while the check is not met."""
    return [*(picked(points) if lent else ()), *extras(points)[:ROUNDS]]


def picked(points: Sequence[Point]) -> list[Point]:
    """The points to trace; all of them where they are few."""
    wanted = list(dict.fromkeys(points))
    chosen = [_between(points, place) for place in range(len(SHARES) - 2)]
    return wanted if len(wanted) <= 2 else list(dict.fromkeys(chosen))


def _few(points: Sequence[Point], batches: Sequence[int]) -> list[Point]:
    """Where most is known already: two that differ in everything, at micro-batches that take little."""
    known = sorted({point.micro_batch for point in points} | set(batches))
    small = known[:-1] if len(known) > MOST_BATCHES else known
    places = [_between(points, place) for place in FEW_LOOKS]
    shares = [SHARES[place][0] for place in FEW_LOOKS]
    found = [replace(at, micro_batch=_share(small, share, 1)) for at, share in zip(places, shares, strict=True)]
    return list(dict.fromkeys(found))


def corner(points: Sequence[Point]) -> Point:
    """The most of everything: where an error would be largest."""
    micro_steps = sorted({point.micro_steps for point in points})
    return Point(
        micro_batch=max(point.micro_batch for point in points),
        prompt=max(point.prompt for point in points),
        completion=max(point.completion for point in points),
        micro_steps=micro_steps[0] if len(micro_steps) == 1 else max(6, micro_steps[0]),
    )


def extras(points: Sequence[Point]) -> list[Point]:
    """Where loops are not full yet, at the far corner itself, and in the middle."""
    low, middle = (_between(points, place) for place in (len(SHARES) - 2, len(SHARES) - 1))
    return [low, replace(corner(points), micro_steps=_micro_steps(points, 0)), middle]


def _between(points: Sequence[Point], place: int) -> Point:
    batch, prompt, completion = SHARES[place]
    return Point(
        micro_batch=_share([point.micro_batch for point in points], batch, 1),
        prompt=_share([point.prompt for point in points], prompt, GRID),
        completion=_share([point.completion for point in points], completion, GRID),
        micro_steps=_micro_steps(points, place),
    )


def _micro_steps(points: Sequence[Point], place: int) -> int:
    values = {point.micro_steps for point in points}
    return values.pop() if len(values) == 1 else FEWEST_MICRO_STEPS[place]


def _share(values: Sequence[int], share: float, grid: int) -> int:
    least, most = min(values), max(values)
    between = round((least + share * (most - least)) / grid) * grid
    return least if share == 0 else most if share == 1 else min(most, max(least, between))


def _kinds(config: Mapping[str, object]) -> list[object]:
    """What tells layers apart, one entry for each."""
    text = text_config(config)
    count = text.get("num_hidden_layers")
    named = text.get("layer_types")
    types: Sequence[object] = named if isinstance(named, Sequence) and not isinstance(named, str) else ()
    try:
        return list(zip(shape(config).layers, types, strict=True)) if types else list(shape(config).layers)
    except BadInput:  # an architecture of which nothing is known: the traces will tell
        return list(types) or [None] * (count if isinstance(count, int) else 0)

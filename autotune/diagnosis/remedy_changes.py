"""Remedies as values of one configuration: a direction becomes the values that the search space has in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from autotune.core.space import Candidate, Knob, KnobValue, SearchSpace
from autotune.diagnosis.diagnosis import Advice
from autotune.search.advice import BATCH_KNOBS

Change: TypeAlias = Mapping[str, KnobValue]

_SWITCH: Mapping[str, bool] = {"on": True, "off": False}


def changes_of(advice: Advice, space: SearchSpace, candidate: Candidate) -> Iterator[Change]:
    """Yield the changes from the mildest to the strongest; none for a setting outside the space."""
    for setting, way in advice.change.items():
        direction, _, bound = way.partition(", to at most ")
        if setting == BATCH_KNOBS[0]:
            yield from _smaller_batches(candidate)
        elif knob := next((one for one in (*space.knobs, *space.remedies) if one.name == setting), None):
            now = candidate.settings.get(knob.name)
            yield from ({setting: value} for value in _values(knob, now, direction, int(bound) if bound else None))


def _smaller_batches(candidate: Candidate) -> Iterator[Change]:
    """Yield smaller micro-batches with more accumulation steps, at the same global batch."""
    micro, steps = (candidate.settings.get(name) for name in BATCH_KNOBS[:2])
    if isinstance(micro, int) and isinstance(steps, int):
        halves = [size for size in range(micro - 1, 0, -1) if micro % size == 0 and size & (size - 1) == 0]
        yield from ({BATCH_KNOBS[0]: size, BATCH_KNOBS[1]: steps * micro // size} for size in halves)


def _values(knob: Knob, now: KnobValue, direction: str, bound: int | None) -> list[KnobValue]:
    if direction in _SWITCH:
        return [_SWITCH[direction]] if now is not _SWITCH[direction] else []
    if direction not in ("raise", "lower"):
        return [choice for choice in knob.choices if str(choice) == direction and choice != now]
    if bound is not None:
        return [bound]
    numbers = sorted(choice for choice in knob.choices if isinstance(choice, int | float) and not isinstance(choice, bool))
    if not isinstance(now, int | float):
        return []
    return [n for n in numbers if n > now] if direction == "raise" else [n for n in reversed(numbers) if n < now]

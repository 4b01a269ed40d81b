"""How a model's layers repeat in a trace: how often a block came before, and where layers run from the last to the first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from autotune.predict.pieces.blocks import Key


def counted(order: Sequence[tuple[int, bool]]) -> Iterator[tuple[int, int]]:
    """Each place with how often it came before."""
    seen: dict[int, int] = defaultdict(int)
    for place, _ in order:
        yield place, seen[place]
        seen[place] += 1


def falling(keys: Sequence[Key]) -> set[int]:
    """Blocks of stays in which layers run from the last to the first."""
    found: set[int] = set()
    for _, several in groupby(enumerate(keys), lambda one: _stay(one[1])):
        before: int | None = None
        latest: int | None = None
        for place, key in several:
            of = layer_of(key)
            if of != latest and of is not None:
                before, latest = latest, of
            if of is not None and before is not None and before > of:
                found.add(place)
    return found


def layer_of(key: Key) -> int | None:
    return key.layer if key.layer is not None else key.after


def _stay(key: Key) -> tuple[object, ...]:
    return key.phase, key.step, key.run

"""Two ranks, of which the second meets a mistake of the user's."""

from __future__ import annotations

from parts import loop, rank


def measure(model):
    if rank() == 1:
        raise LookupError("no judge is configured for task 'gsm8k'")


loop(then=measure)

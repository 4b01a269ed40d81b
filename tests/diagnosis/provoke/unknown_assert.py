"""An assertion of the user's own."""

from __future__ import annotations

from parts import loop


def check(model):
    assert len(list(model.parameters())) == 7, len(list(model.parameters()))


loop(then=check)

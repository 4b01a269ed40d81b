"""A loop that stops itself when its loss is no number."""

from __future__ import annotations

import math

from parts import loop


def check(model):
    loss = math.nan
    if math.isnan(loss):
        raise FloatingPointError(f"the loss became {loss} at step 2")


loop(then=check)

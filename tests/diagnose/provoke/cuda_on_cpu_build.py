"""A GPU asked for, with a build of torch that knows none."""

from __future__ import annotations

from parts import loop

loop(then=lambda model: model.to("cuda"))

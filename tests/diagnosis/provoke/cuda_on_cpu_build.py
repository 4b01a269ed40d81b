"""GPU requested with a build of torch without CUDA."""

from __future__ import annotations

from parts import loop

loop(then=lambda model: model.to("cuda"))

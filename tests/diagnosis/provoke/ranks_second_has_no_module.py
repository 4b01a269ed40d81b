"""Two ranks, of which the second lacks a package."""

from __future__ import annotations

from parts import loop, rank


def compress(_):
    if rank() == 1:
        import apex  # noqa: F401


loop(then=compress)

"""A rank that ends early, as if it were done."""

from __future__ import annotations

import sys

from parts import loop, rank


def leave(_):
    if rank() == 1:
        sys.exit(0)


loop(then=leave)

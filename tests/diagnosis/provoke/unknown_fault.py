"""Two ranks, of which the second exits by a fault in a library."""

from __future__ import annotations

import ctypes

from parts import loop, rank

loop(then=lambda _: ctypes.string_at(0) if rank() == 1 else None)

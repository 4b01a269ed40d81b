"""Waiting until a GPU is as empty as before: memory goes back a moment after its process has ended, and an engine that starts
meanwhile mistakes what a neighbour gives back for its own."""

from __future__ import annotations

import time
from collections.abc import Callable

BACK_BYTES = 32 * 2**20
"""So much more than before is as before: drivers keep some."""

BACK_SECONDS = 30.0
"""So long the driver may take to tidy up after a process that was killed."""

LOOK_SECONDS = 0.1


def wait_until_back(
    used_bytes: Callable[[], int],
    base_bytes: int,
    *,
    patience_seconds: float = BACK_SECONDS,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """By how much it stays above the base: 0 once it is back and two looks running agree."""
    deadline, last = now() + patience_seconds, None
    while True:
        used = used_bytes()
        back = used <= base_bytes + BACK_BYTES
        if back and last is not None and abs(used - last) <= BACK_BYTES:
            return 0
        if now() >= deadline:
            return 0 if back else used - base_bytes
        last = used
        sleep(LOOK_SECONDS)

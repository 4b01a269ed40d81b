"""A run that somebody stopped."""

from __future__ import annotations

import time

from parts import loop

loop(then=lambda _: time.sleep(60))

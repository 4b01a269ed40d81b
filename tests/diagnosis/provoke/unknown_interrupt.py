"""A run that was interrupted by hand."""

from __future__ import annotations

import time

from parts import loop

loop(then=lambda _: time.sleep(60))

"""Two ranks that finish."""

from __future__ import annotations

from parts import loop

loop()

from __future__ import annotations

PHASES = ("score", "forward", "backward", "optimizer")
"""Phases whose peaks are compared one by one. Nothing is generated, and rewards need no memory."""

from __future__ import annotations

PHASES = ("score", "forward", "backward", "optimizer")
"""Those whose peaks are compared one by one. Nothing is generated here, and rewards take nothing."""

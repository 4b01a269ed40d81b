"""Difference of two texts."""

from __future__ import annotations

import difflib


def unified_diff(
    before: str,
    after: str,
    name: str,
) -> str:
    """Return a diff for `patch -p1`; empty without a change."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{name}",
        f"b/{name}",
    )
    diff = ""
    for line in lines:
        diff += line
        if not line.endswith("\n"):
            diff += "\n\\ No newline at end of file\n"
    return diff

"""Parsing and formatting of sizes and durations.

`40G` is 40 GiB, as in nvidia-smi, torch and vLLM. A number without a unit is refused: `3` could be
bytes as well as GiB.
"""

from __future__ import annotations

import re

from autotune.core.errors import BadInput

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:I?B)?|B)", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,18}(?:\.\d{1,18})?", re.ASCII)
_FACTOR = {None: 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB}
_MAX_DIGITS = 18

_DURATION = re.compile(r"(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+(?:\.\d+)?)s?)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse `"38G"`, `"1.5 GiB"`, `"800MB"` or `"1024B"` into bytes."""
    match = _SIZE.fullmatch(text.strip())
    if _NUMBER.fullmatch(text.strip()) and float(text) > 0:
        raise BadInput(
            f"{text!r} has no unit.",
            way_out=f"Did you mean {text.strip()}GiB? Write it like 38G, 1.5G or 800M.",
        )
    if match is None or len(match[1]) > _MAX_DIGITS or float(match[1]) == 0:
        raise BadInput(
            f"{text!r} is not a size above zero.", way_out="Write it like 38G, 1.5G or 800M."
        )
    return int(float(match[1]) * _FACTOR[match[2] and match[2].upper()])


def format_bytes(count: int | float) -> str:
    """Format bytes with three significant digits: `1.95 GiB`, `812 MiB`."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            return (
                f"{count / unit:.3g} {name}"
                if abs(count) < 999.5 * unit
                else f"{count / unit:.0f} {name}"
            )
    return f"{count:.0f} B"


def parse_seconds(text: str) -> float:
    """Parse `"5m"`, `"1h30m"`, `"90s"` or `"90"` into seconds."""
    match = _DURATION.fullmatch(text.strip())
    seconds = 0.0
    if match is not None and text.strip() and len(text) <= 3 * _MAX_DIGITS:
        hours, minutes, rest = (float(part) if part else 0.0 for part in match.groups())
        seconds = hours * 3600 + minutes * 60 + rest
    if seconds <= 0:
        raise BadInput(
            f"{text!r} is not a duration above zero.", way_out="Write it like 20m, 1h30m or 90s."
        )
    return seconds


def format_seconds(seconds: float) -> str:
    """Format seconds: `0.42 s`, `48 s`, `3 min 20 s`, `1 h 05 min`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 probe`, `2 probes`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"

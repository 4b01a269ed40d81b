"""Parsing and formatting of sizes and durations.

`40G` is 40 GiB, as in nvidia-smi, torch and vLLM. A number without a unit is refused: `3` could be
bytes as well as GiB.
"""

from __future__ import annotations

import re

from autotune.core.errors import BadInput

KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:I?B)?|B)", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,18}(?:\.\d{1,18})?", re.ASCII)
_FACTORS = {None: 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB}
_MAX_DIGITS = 18

_AMOUNT = r"(\d+(?:\.\d+)?)\s*"
_DURATION = re.compile(
    rf"(?:{_AMOUNT}h(?:rs?|ours?)?)?\s*"
    rf"(?:{_AMOUNT}m(?:ins?|inutes?)?)?\s*"
    rf"(?:{_AMOUNT}s(?:ecs?|econds?)?)?",
    re.IGNORECASE | re.ASCII,
)
_PERCENT = re.compile(rf"{_AMOUNT}%", re.ASCII)


def parse_bytes(text: str) -> int:
    """Parse `"38G"`, `"1.5 GiB"`, `"800MB"` or `"1024B"` into bytes."""
    size = text.strip()
    if _NUMBER.fullmatch(size) and float(size) > 0:
        raise BadInput(
            f"{text!r} has no unit.",
            way_out=f"Did you mean {size}GiB? Write it like 38G, 1.5G or 800M.",
        )
    match = _SIZE.fullmatch(size)
    if match is None or len(match[1]) > _MAX_DIGITS or float(match[1]) == 0:
        raise BadInput(
            f"{text!r} is not a size above zero.", way_out="Write it like 38G, 1.5G or 800M."
        )
    number, unit = match.groups()
    return int(float(number) * _FACTORS[unit and unit.upper()])


def format_bytes(count: int | float) -> str:
    """Format bytes with three significant digits: `1.95 GiB`, `812 MiB`."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= 999.5 * unit:
            return f"{count / unit:.0f} {name}"
        if abs(count) >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def parse_share(text: str) -> float | None:
    """Parse `"95%"` into 0.95; None for a text without a percent sign."""
    if not text.rstrip().endswith("%"):
        return None
    match = _PERCENT.fullmatch(text.strip())
    share = 0.0
    if match is not None and len(match[1]) <= _MAX_DIGITS:
        share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise BadInput(f"{text!r} is not a share above zero.", way_out="Write it like 95%.")
    return share


def parse_seconds(text: str) -> float:
    """Parse `"5m"`, `"20min"`, `"0.5h"`, `"1h30m"` or `"90s"` into seconds."""
    duration = text.strip()
    if _NUMBER.fullmatch(duration) and float(duration) > 0:
        raise BadInput(
            f"{text!r} has no unit.",
            way_out=f"Did you mean {duration}m? Write it like 20m, 1h30m or 90s.",
        )
    match = _DURATION.fullmatch(duration)
    total = 0.0
    if match is not None and duration and len(text) <= 3 * _MAX_DIGITS:
        hours, minutes, seconds = (float(part or 0) for part in match.groups())
        total = hours * 3600 + minutes * 60 + seconds
    if total <= 0:
        raise BadInput(
            f"{text!r} is not a duration above zero.", way_out="Write it like 20m, 1h30m or 90s."
        )
    return total


def format_seconds(duration: float) -> str:
    """Format seconds: `0.42 s`, `48 s`, `3 min 20 s`, `1 h 05 min`."""
    if duration < 10:
        return f"{duration:.2g} s"
    if duration < 120:
        return f"{duration:.0f} s"
    minutes, seconds = divmod(round(duration), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def counted(
    count: int,
    noun: str,
    plural: str = "",
) -> str:
    """Return a number with its noun: `1 probe`, `2 probes`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"

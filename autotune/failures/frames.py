"""Purpose of the memory and phase of the step, derived from the frames of a traceback.

The innermost frame that matches decides: every training step passes through the trainer's log-probabilities, and what ran out
there may still have been a layer's activations. Some frames cover everything that they call: an engine's profiling run passes
through a model's layers too. The table is tables/frames.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from autotune.core.measurement import Phase
from autotune.failures.patterns import expand, read_table

_Word = TypeVar("_Word", bound=str)


class _FrameTable(msgspec.Struct, forbid_unknown_fields=True):
    """Lists of {meaning: pattern}, searched in their order."""

    hands_over: str
    saves: str
    evaluates: str
    within: list[dict[str, str]]
    causes: list[dict[str, str]]
    in_general: list[dict[str, str]]
    phases: list[dict[Phase, str]]
    latest: list[dict[Phase, str]]
    last: list[dict[Phase, str]]


def _pairs(rows: list[dict[_Word, str]]) -> tuple[tuple[str, _Word], ...]:
    return tuple((expand(pattern), word) for row in rows for word, pattern in row.items())


_TABLE = read_table("frames", _FrameTable)
_WITHIN, _CAUSES, _IN_GENERAL = _pairs(_TABLE.within), _pairs(_TABLE.causes), _pairs(_TABLE.in_general)
_PHASES, _LATEST, _LAST = _pairs(_TABLE.phases), _pairs(_TABLE.latest), _pairs(_TABLE.last)
_HANDS_OVER, _SAVES, _EVALUATES = expand(_TABLE.hands_over), expand(_TABLE.saves), expand(_TABLE.evaluates)


def cause_of(frames: Sequence[str]) -> str | None:
    """Return the purpose of the memory; the last frame is the innermost."""
    hands_over = _any(_HANDS_OVER, frames)
    cause = _first(frames, _CAUSES)
    for pattern, word in _WITHIN:
        # A loader may start an engine too, which has a cache.
        if _any(pattern, frames) and not (word == "weights" and cause == "kv_cache"):
            return "weight_sync" if hands_over and word == "weights" else word
    if hands_over and cause in ("zero_gather", "weights", None):
        return "weight_sync"
    if cause == "weight_sync" and not hands_over and _any(r":full_tensor\b", frames) and _any(_SAVES, frames):
        return "zero_gather"
    return cause or _first(frames, _IN_GENERAL)


def phase_of(frames: Sequence[str]) -> Phase | None:
    """Return the phase of the step, None where no frame indicates it."""
    phase = _first(frames, _PHASES) or _first(frames, _LATEST)
    return phase or (None if _any(_EVALUATES, frames) else _first(frames, _LAST))


def _any(pattern: str, frames: Sequence[str]) -> bool:
    return any(re.search(pattern, frame) for frame in frames)


def _first(frames: Sequence[str], table: Sequence[tuple[str, _Word]]) -> _Word | None:
    for frame in reversed(frames):
        for pattern, word in table:
            if re.search(pattern, frame):
                return word
    return None

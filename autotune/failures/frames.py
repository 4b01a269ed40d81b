"""What the places in a traceback tell: what the memory was for, and which phase it was.

From the innermost outwards, the first place that says something decides: every training step passes through the trainer's
log-probabilities, and yet what ran out there may have been a layer's activations. Some places stand for all that they call:
what an engine tries out when it starts runs through a model's layers too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from autotune.failures.places import CAUSES, EVALUATES, HANDS_OVER, IN_GENERAL, LAST, LATEST, PHASES, SAVES, WITHIN
from autotune.measurement import Phase

_Word = TypeVar("_Word", bound=str)


def cause_of(frames: Sequence[str]) -> str | None:
    """What the memory was for, by frames of which the last is the innermost."""
    hands_over = _any(HANDS_OVER, frames)
    cause = _first(frames, CAUSES)
    for pattern, word in WITHIN:
        # A loader may start an engine too, with a cache of its own.
        if _any(pattern, frames) and not (word == "weights" and cause == "kv_cache"):
            return "weight_sync" if hands_over and word == "weights" else word
    if hands_over and cause in ("zero_gather", "weights", None):
        return "weight_sync"
    if cause == "weight_sync" and not hands_over and _any(r":full_tensor\b", frames) and _any(SAVES, frames):
        return "zero_gather"
    return cause or _first(frames, IN_GENERAL)


def phase_of(frames: Sequence[str]) -> Phase | None:
    """Which phase it was."""
    told = _first(frames, PHASES) or _first(frames, LATEST)
    return told or (None if _any(EVALUATES, frames) else _first(frames, LAST))


def _any(pattern: str, frames: Sequence[str]) -> bool:
    return any(re.search(pattern, frame) for frame in frames)


def _first(frames: Sequence[str], table: Sequence[tuple[str, _Word]]) -> _Word | None:
    for frame in reversed(frames):
        for pattern, word in table:
            if re.search(pattern, frame):
                return word
    return None

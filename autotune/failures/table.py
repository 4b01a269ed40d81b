"""The closed table of failure texts. The first row that matches decides; the order is part of the table.

    rows_of_memory.py     what ran out, of whose memory, and what only looks like it
    rows_of_refusals.py   settings and data that are refused
    rows_of_others.py     what is missing, unreachable, broken or waiting
    rows_of_checks.py     where no words are known: what a framework's own check raised, by where it stands
    rows_of_files.py      what is not there or can't be read, and what an exception's class is called

A row is read in the exception that was raised, at the places where it was raised; and, where its words are such that only a
failure has them, in any line that was printed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.measurement import Phase

MEMORY_CAUSES = (
    "weights", "optimizer", "activations", "logits", "kv_cache", "engine_startup", "weight_sync", "zero_gather", "fragmentation",
    "host_ram", "gpu_other_process", "unknown_memory",
)  # fmt: skip
OTHER_CAUSES = (
    "illegal_config", "hang_or_nccl", "version", "data", "disk_or_permission", "network", "cuda_fault", "numeric", "none",
)  # fmt: skip
CAUSES = MEMORY_CAUSES + OTHER_CAUSES

Kind = Literal["memory", "host_memory", "illegal", "transient", "other"]
"""memory: out of it, in the phase at hand. host_memory: out of the machine's own. illegal: never to be tried again.
transient: says nothing about the candidate, to be repeated. other: a crash with a known cause."""

Said = Literal["anywhere", "as an error", "raised"]
"""Where the words are believed: in any printed line; in one that its logger called an error, or that an aborting program
printed; or only in an exception that was raised."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One known text."""

    name: str
    """What its samples are called: texts that were produced, each with the word where."""

    pattern: str
    """A regular expression, searched for in `Type: text` of an exception, or in a line."""

    kind: Kind
    cause: str | None = None
    """None: told by the frames and the phase it was raised in."""

    phase: Phase | None = None
    """Where this text can only come from; None: wherever it happened."""

    secondary: bool = False
    """True for what a process says when another one failed first."""

    said: Said = "raised"

    places: str | None = None
    """Words that many failures share are told apart by where they were raised: a regular expression for `file:function`."""

    innermost: int = 4
    """Among so many of the innermost frames it is looked for."""

    sure: bool = False
    """True where such a line alone tells what failed first, though a traceback may follow that says less."""

    on_host: bool = False
    """True where a process on a GPU says it of the machine's own memory."""

    def search(self, text: str, frames: Sequence[str] = ()) -> re.Match[str] | None:
        if self.places is not None and not self._is_there(frames):
            return None
        return _compiled(self.pattern).search(text)

    def _is_there(self, frames: Sequence[str]) -> bool:
        if self.kind in ("illegal", "other") and self.cause != "network" and any(_REWARDS.search(frame) for frame in frames):
            return False
        place = _compiled(self.places or "")
        # Who asked for an attribute that is not there is to blame, not the code that looks it up.
        asking = [frame for frame in frames if not _LOOKUP.search(frame)]
        return any(place.search(frame) for frame in asking[-self.innermost :])


def any_of(*patterns: str) -> str:
    """One pattern of several texts, one to a line."""
    return "|".join(patterns)


_REWARDS = re.compile(
    r"\A\S*(?::_calculate_rewards|:compute_rewards?|/reward_managers?/\S*:\w+)\b"
    r"|\A\S+ .*\b(?:\w*reward_(?:fn|func|function)\w*|compute_score|compute_metrics|formatting_func|rollout_func)\("
)
"""Behind these a user's own functions run: where something failed says nothing there of settings, data or versions."""

_LOOKUP = re.compile(r"\A\S*:__getattr(?:ibute)?__\b")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.DOTALL)

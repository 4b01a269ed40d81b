"""The closed table of failure texts. The first row that matches decides; the order is part of the table.

    rows_of_memory.py   what ran out, of whose memory, and what only looks like it
    rows_of_others.py   what is refused, missing, unreachable, broken or waiting

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

    on_host: bool = False
    """True where a process on a GPU says it of the machine's own memory."""

    def search(self, text: str, frames: Sequence[str] = ()) -> re.Match[str] | None:
        if self.places is not None and not self._is_there(frames):
            return None
        return _compiled(self.pattern).search(text)

    def _is_there(self, frames: Sequence[str]) -> bool:
        place = _compiled(self.places or "")
        return any(place.search(frame) for frame in frames[-self.innermost :])


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.DOTALL)

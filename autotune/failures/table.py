"""Closed table of failure texts. The first row that matches decides, so that the order is part of the table.

    tables/memory.yaml     which memory ran out, and what only resembles it
    tables/refusals.yaml   settings and data that are refused
    tables/others.yaml     missing, unreachable, broken or waiting parts
    tables/checks.yaml     checks of a framework, recognised by their place instead of their words
    tables/files.yaml      files that are absent or unreadable, and classes of exceptions
    tables/excerpts.yaml   messages quoted without their place: read in short texts alone
    tables/warnings.yaml   warnings of a training that continues, but loses speed or differs from its configuration

A row is searched for in the exception that was raised, at its place in the code; and, where only a failure has such words, in
every printed line.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from autotune.core.measurement import Phase
from autotune.failures.patterns import expand, read_table

MEMORY_CAUSES = (
    "weights", "optimizer", "activations", "logits", "kv_cache", "engine_startup", "weight_sync", "zero_gather", "fragmentation",
    "host_ram", "gpu_other_process", "unknown_memory",
)  # fmt: skip
OTHER_CAUSES = (
    "illegal_config", "hang_or_nccl", "version", "data", "disk_or_permission", "network", "cuda_fault", "numeric", "none",
)  # fmt: skip
CAUSES = MEMORY_CAUSES + OTHER_CAUSES

TABLES = ("memory", "refusals", "others", "checks", "files")  # tables in the order in which they are searched

Kind = Literal["memory", "host_memory", "illegal", "transient", "other"]
"""memory: out of device memory in the current phase. host_memory: out of the machine's memory. illegal: never tried again.
transient: no verdict on the candidate, measured again. other: crash with a known cause."""

ReadIn = Literal["any line", "error line", "exception"]
"""Texts in which a row counts: every printed line; a line that its logger marked as an error or that an aborting program
printed; or an exception that was raised."""


class FailureRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Known text."""

    name: str  # also of its recorded samples in the tests
    pattern: str  # regular expression for `Type: text` of an exception, or for a line
    kind: Kind
    cause: str | None = None  # None: derived from the frames and the phase
    phase: Phase | None = None  # in which alone this text is printed; None: any phase
    secondary: bool = False  # message of a process that failed because another one had failed
    read_in: ReadIn = "exception"
    raised_at: str | None = None  # regular expression for `file:function statement`, where many failures share the words
    innermost_frames: int = 4  # in which `raised_at` is searched for
    decisive: bool = False  # names the first failure even if a traceback with less information follows
    on_host: bool = False  # a process on a GPU prints it about the machine's memory

    def search(self, text: str, frames: Sequence[str] = ()) -> re.Match[str] | None:
        """Return the match of the row in the text, None where it does not apply."""
        if self.raised_at is not None:
            if self.kind in ("illegal", "other") and self.cause != "network" and any(map(_REWARDS.search, frames)):
                return None
            # The caller that requests a missing attribute is at fault, not the code that looks it up.
            callers = [frame for frame in frames if not _LOOKUP.search(frame)]
            if not any(map(_compiled(self.raised_at).search, callers[-self.innermost_frames :])):
                return None
        return _compiled(self.pattern).search(text)


_REWARDS = re.compile(
    r"\A\S*(?::_calculate_rewards|:compute_rewards?|/reward_managers?/\S*:\w+)\b"
    r"|\A\S+ .*\b(?:\w*reward_(?:fn|func|function)\w*|compute_score|compute_metrics|formatting_func|rollout_func)\("
)
"""Frames that call the user's own functions: a failure behind them indicates nothing about settings, data or versions."""

_LOOKUP = re.compile(r"\A\S*:__getattr(?:ibute)?__\b")

_BACKTICK = re.compile(r"`(?!\?)")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the expression; who quotes a message may have lost its backticks."""
    return re.compile(_BACKTICK.sub("`?", pattern), re.IGNORECASE | re.DOTALL)


def _read(*tables: str) -> tuple[FailureRow, ...]:
    entries: list[dict[str, Any]] = [entry for table in tables for entry in read_table(table, list[dict[str, Any]])]
    for entry in entries:
        entry.update({key: expand(entry[key]) for key in ("pattern", "raised_at") if key in entry})
    return msgspec.convert(entries, tuple[FailureRow, ...])


ROWS = _read(*TABLES)  # whole table in its order

QUOTED_ROWS = _read("excerpts")  # rows of short excerpts, behind the others


class KnownWarning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Row of tables/warnings.yaml."""

    name: str
    pattern: str
    says: str  # meaning for the run


KNOWN_WARNINGS = read_table("warnings", tuple[KnownWarning, ...])


def warning_in(line: str) -> str | None:
    """Return the meaning of the warning in a line, None where there is none."""
    return next((known.says for known in KNOWN_WARNINGS if re.search(known.pattern, line, re.IGNORECASE)), None)

"""Warnings of a training that continues, but loses speed or differs from its configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KnownWarning:
    """Known warning."""

    name: str
    pattern: str
    says: str
    """Meaning for the run."""


KNOWN_WARNINGS: tuple[KnownWarning, ...] = (
    KnownWarning(
        name="vllm_preempted",
        pattern=r"is preempted by PreemptionMode\.\w+|preempted .{0,80}not enough KV cache",
        says="vLLM's KV cache was full, and sequences were computed again: raise its share, or lower how many run at once",
    ),
    KnownWarning(
        name="unsloth_batch_changed",
        pattern=r"Unsloth: We now expect .{0,200}to be a multiple|^We will change the batch size of",
        says="unsloth changed the micro-batch by itself: what ran is not what was configured",
    ),
    KnownWarning(
        name="unsloth_share_changed",
        pattern=r"Standby mode is enabled\. Changing",
        says="unsloth changed vLLM's share by itself: what ran is not what was configured",
    ),
)


def warning_in(line: str) -> str | None:
    """Return the meaning of the warning in a line, None where there is none."""
    return next((remark.says for remark in KNOWN_WARNINGS if re.search(remark.pattern, line, re.IGNORECASE)), None)

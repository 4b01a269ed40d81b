"""What a training says that goes on running: no failure, and yet it costs speed, or is not what was asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Remark:
    """One text of this kind."""

    name: str
    pattern: str
    says: str
    """What it means for the run."""


REMARKS: tuple[Remark, ...] = (
    Remark(
        name="vllm_preempted",
        pattern=r"is preempted by PreemptionMode\.\w+|preempted .{0,80}not enough KV cache",
        says="vLLM's KV cache was full, and sequences were computed again: raise its share, or lower how many run at once",
    ),
    Remark(
        name="unsloth_batch_changed",
        pattern=r"Unsloth: We now expect .{0,200}to be a multiple|^We will change the batch size of",
        says="unsloth changed the micro-batch by itself: what ran is not what was configured",
    ),
    Remark(
        name="unsloth_share_changed",
        pattern=r"Standby mode is enabled\. Changing",
        says="unsloth changed vLLM's share by itself: what ran is not what was configured",
    ),
)


def remarks_in(line: str) -> str | None:
    """What a line says of this kind."""
    return next((remark.says for remark in REMARKS if re.search(remark.pattern, line, re.IGNORECASE)), None)

"""Speed of attention kernels by card (attention.yaml)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from autotune.core.prediction import Estimate
from autotune.core.yaml_document import packaged_table

Kernel = Literal[
    "flash_attention_2", "flash_attention_3", "flash_attention_4", "cudnn", "flex_attention"
]
UNKNOWN_CARD_FACTOR = 2.0  # of a share that is known of other capabilities only
CUDNN_PREFERRED = (9.0, 10.0)  # Data-centre cards whose SDPA prefers cuDNN

_KERNELS_BY_WORD: dict[str, Kernel] = {
    "flex": "flex_attention",
    "attention_4": "flash_attention_4",
    "attn4": "flash_attention_4",
    "attention_3": "flash_attention_3",
    "attn3": "flash_attention_3",
    "attention_2": "flash_attention_2",
    "attn": "flash_attention_2",
}
"""Words of the names that transformers, prime-rl and the kernels' packages use."""


@dataclass(frozen=True, kw_only=True)
class AttentionRow(Estimate):
    """Share of the dense peak, from public sources."""

    kernel: Kernel
    capabilities: tuple[str, ...]
    why: str
    sources: tuple[str, ...]

    def distance(self, capability: float) -> float:
        """Return how far the nearest of the capabilities is."""
        nearest = math.inf
        for row_capability in self.capabilities:
            nearest = min(nearest, abs(float(row_capability) - capability))
        return nearest


@dataclass(frozen=True, kw_only=True)
class _AttentionFile:
    schema: Literal[1]
    kernels: tuple[AttentionRow, ...]


@functools.cache
def attention_rows() -> tuple[AttentionRow, ...]:
    return packaged_table(__package__, "attention.yaml", _AttentionFile).kernels


def kernel_of(implementation: str | None, compute_capability: str | None) -> Kernel:
    """Return the kernel that an attention implementation runs; None and `sdpa`: torch's choice.

    On data-centre cards from Hopper on, torch prefers cuDNN's kernel.
    """
    for word, kernel in _KERNELS_BY_WORD.items():
        if word in (implementation or ""):
            return kernel
    if float(compute_capability or 0) in CUDNN_PREFERRED:
        return "cudnn"
    return "flash_attention_2"


def is_measured(kernel: Kernel, compute_capability: str | None) -> bool:
    """Return True if a row states the kernel's share on cards of this capability."""
    return compute_capability in _nearest(kernel, compute_capability).capabilities


def attention_share(kernel: Kernel, compute_capability: str | None) -> Estimate:
    """Return the share of the dense peak that a kernel reaches on a card; of other cards a wider
    interval around that of the nearest one.
    """
    nearest = _nearest(kernel, compute_capability)
    if is_measured(kernel, compute_capability):
        return nearest
    return Estimate(
        value=nearest.value,
        low=nearest.low / UNKNOWN_CARD_FACTOR,
        high=min(1.0, nearest.high * UNKNOWN_CARD_FACTOR),
    )


def _nearest(kernel: Kernel, compute_capability: str | None) -> AttentionRow:
    """Return the kernel's row for the nearest capability."""
    capability = float(compute_capability or 0)
    rows = []
    for row in attention_rows():
        if row.kernel == kernel:
            rows.append(row)
    return min(rows, key=lambda row: row.distance(capability))

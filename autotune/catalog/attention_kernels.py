"""Speed of attention kernels by card (attention.yaml)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from autotune.core.prediction import Estimate
from autotune.core.yaml_document import packaged_table

Kernel = Literal[
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "cudnn",
    "flex_attention",
    "efficient_attention",
]
UNKNOWN_CARD_FACTOR = 2.0  # of a share that is known of other capabilities only
CUDNN_PREFERRED = (9.0, 10.0, 10.3)  # Data-centre cards whose SDPA prefers cuDNN
CUDNN_PREFERRED_FROM = (2, 11)  # torch: the first wheels with cuDNN 9.15.1 or later
USUAL_HEAD_SIZE = 128  # the largest head that every kernel was written for

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
class AttentionUse:
    """How a step computes its attention."""

    kernel: Kernel
    row_tokens: int | None = None  # None: rows as long as a kernel needs
    head_size: int | None = None  # None: at most `USUAL_HEAD_SIZE`

    @property
    def has_wide_heads(self) -> bool:
        return (self.head_size or 0) > USUAL_HEAD_SIZE


@dataclass(frozen=True, kw_only=True)
class AttentionRow(Estimate):
    """Share of the dense peak, from public sources."""

    kernel: Kernel
    capabilities: tuple[str, ...]
    half_tokens: int = 0  # rows of this length reach half of the share; 0: not known
    wide_heads_factor: float = 1.0  # of the share, with heads above 128
    inferred: bool = False  # from rows of other cards
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


def kernel_of(
    implementation: str | None,
    compute_capability: str | None,
    torch: tuple[int, ...] = CUDNN_PREFERRED_FROM,
) -> Kernel:
    """Return the kernel that an attention implementation runs; None and `sdpa`: torch's choice.

    On data-centre cards from Hopper on, torch prefers cuDNN's kernel where it is 9.15.1 or later
    (`check_prefer_cudnn_attention` in sdp_utils.cpp). `torch`: its release.
    """
    for word, kernel in _KERNELS_BY_WORD.items():
        if word in (implementation or ""):
            return kernel
    prefers_cudnn = torch >= CUDNN_PREFERRED_FROM
    if prefers_cudnn and float(compute_capability or 0) in CUDNN_PREFERRED:
        return "cudnn"
    return "flash_attention_2"


def is_measured(kernel: Kernel, compute_capability: str | None) -> bool:
    """Return True if a row states the kernel's share on cards of this capability."""
    nearest = _nearest(kernel, compute_capability)
    return compute_capability in nearest.capabilities and not nearest.inferred


def attention_share(attention: AttentionUse, compute_capability: str | None) -> Estimate:
    """Return the share of the dense peak that a kernel reaches on a card; of other cards a wider
    interval around that of the nearest one.

        share = share of long rows * wide_heads_factor / (1 + half_tokens / row_tokens)
    """
    nearest = _nearest(attention.kernel, compute_capability)
    share: Estimate = nearest
    if not is_measured(attention.kernel, compute_capability):
        share = Estimate(
            value=nearest.value,
            low=nearest.low / UNKNOWN_CARD_FACTOR,
            high=min(1.0, nearest.high * UNKNOWN_CARD_FACTOR),
        )
    if attention.has_wide_heads:
        share = share.scaled(nearest.wide_heads_factor)
    if not attention.row_tokens or not nearest.half_tokens:
        return share
    return share.scaled(1 / (1 + nearest.half_tokens / attention.row_tokens))


def _nearest(kernel: Kernel, compute_capability: str | None) -> AttentionRow:
    """Return the kernel's row for the nearest capability."""
    capability = float(compute_capability or 0)
    rows = []
    for row in attention_rows():
        if row.kernel == kernel:
            rows.append(row)
    return min(rows, key=lambda row: row.distance(capability))

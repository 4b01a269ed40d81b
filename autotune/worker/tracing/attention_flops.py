"""FLOPs of attention kernels.

torch's own counters ignore causal masks and windows, reject shared key heads, and read the layout of
`_flash_attention_forward` (row, head, size) as that of `scaled_dot_product_attention` (head, row, size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MARK = "attention:"
"""Prefix of the dtype under which these FLOPs are counted: they run at a lower share of the peak."""

NAMES = frozenset(
    f"{kernel}{direction}"
    for kernel in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
                   "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu")
    for direction in ("", "_backward")
) | {"_flash_attention_forward", "_flash_attention_backward", "flash3_varlen", "flash3_varlen_backward"}  # fmt: skip


@dataclass(frozen=True)
class AttentionFlops:
    """Formula of one kernel: 2 · (query, key) pairs · sizes of its products."""

    arguments: tuple[str, ...]
    rows_first: bool  # layout row, head, size
    backward: bool

    def __call__(self, *args: Any, out_val: Any = None, **kwargs: Any) -> float:
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        query, value = given["query"].shape, given["value"].shape
        # Forward: scores, and scores with values. Backward: scores again, and both sides of the two.
        size = 3 * query[-1] + 2 * value[-1] if self.backward else query[-1] + value[-1]
        if "pairs" in given:  # of sequences with different lengths, per head
            return float(2 * given["pairs"] * query[-2] * size)
        keys = given["max_k"] if self.rows_first else given["key"].shape[-2]
        rows = query.numel() / query[-1]
        pairs = rows * seen_keys(int(keys), causal=bool(given.get("is_causal")), window=given.get("window_size_left"))
        return float(2 * pairs * size)


def seen_keys(keys: int, *, causal: bool, window: int | None) -> float:
    """Return the keys that a query attends to, in the mean over the queries of a row."""
    if not causal:
        return keys
    if window is None or window < 0 or window >= keys:
        return keys / 2
    return window - window * window / (2 * keys)


def formula(packet: Any, arguments: Sequence[Any]) -> AttentionFlops | None:
    """Return the formula of an operation; None for other operations. `arguments`: its schema's."""
    name = str(packet).rsplit(".", 1)[-1]
    if name not in NAMES:
        return None
    return AttentionFlops(
        arguments=tuple(argument.name for argument in arguments),
        rows_first=name.startswith("_flash"),
        backward=name.endswith("_backward"),
    )

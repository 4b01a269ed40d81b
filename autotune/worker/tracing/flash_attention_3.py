"""FlashAttention 3 over packed rows: outputs, saved tensors and workspaces of the kernel, without its arithmetic.

Written for `FlashAttnVarlenFunc` in `hopper/flash_attn_interface.py` and `mha_bwd` in `hopper/flash_api.cpp` of
flash-attention, which `kernels-community/flash-attn3` builds. The two operations allocate their results on any device, so
that real tensors hold the same as fake ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from . import traced_gpu
from .workspaces import round_up


def _forward(query: Any, key: Any, value: Any, pairs: int) -> Any:
    """Return the output, and log-sum-exp as head, token."""
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


def _backward(gradient: Any, query: Any, key: Any, value: Any, pairs: int, sequences: int) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_SCHEMAS = {
    "flash3_varlen(Tensor query, Tensor key, Tensor value, int pairs) -> (Tensor, Tensor)": _forward,
    "flash3_varlen_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, int pairs, int sequences)"
    " -> (Tensor, Tensor, Tensor)": _backward,
}
_LIBRARY = torch.library.Library("autotune", "FRAGMENT")
"""Keeps the operations registered. A module that was imported under another name may have done so."""

for _schema, _kernel in _SCHEMAS.items():
    if not hasattr(torch.ops.autotune, _schema.partition("(")[0]):
        _LIBRARY.define(_schema)
        _LIBRARY.impl(_schema.partition("(")[0], _kernel, "CompositeExplicitAutograd")


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, pairs: int) -> Any:
        out, logsumexp = torch.ops.autotune.flash3_varlen(query, key, value, pairs)
        ctx.save_for_backward(query, key, value, out, logsumexp, starts_q, starts_k)
        ctx.pairs, ctx.sequences = pairs, starts_q.numel() - 1
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        given = (gradient.contiguous(), query, key, value, ctx.pairs, ctx.sequences)
        return *torch.ops.autotune.flash3_varlen_backward(*given), None, None, None


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1), **_: Any,
) -> Any:  # fmt: skip
    """Attention over packed rows: token, head, size."""
    pairs = pairs_of(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), causal=causal, window=window_size[0])
    return _Attention.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, pairs)


def pairs_of(starts_q: Sequence[int], starts_k: Sequence[int], *, causal: bool, window: int) -> int:
    """Return the pairs of query and key that attend, over all sequences; the last query sees the last key."""
    total = 0
    for (begin_q, end_q), (begin_k, end_k) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
        queries, keys = end_q - begin_q, end_k - begin_k
        if not causal:
            total += queries * keys
            continue
        most = keys if window < 0 else min(keys, window + 1)
        first = keys - queries + 1  # keys that the first query sees
        growing = min(queries, max(0, most - first + 1))  # queries that see one key more than the one before
        total += growing * first + growing * (growing - 1) // 2 + (queries - growing) * most
    return total


KERNEL = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
"""The kernel as `kernels.get_kernel` returns it."""


def _blocks(size: int) -> tuple[int, int]:
    """Return rows of a block of queries and of keys (`kBlockM` and `kBlockN` of a causal backward pass)."""
    major, minor = traced_gpu.capability()
    if major >= 9:
        return (128 if size <= 64 else 64), 128 if size <= 128 else 96 if size <= 192 else 80
    if (major, minor) in ((8, 6), (8, 9)):
        return (64 if size <= 192 else 32), 128 if size <= 96 else 96 if size <= 128 else 64
    return (128 if size <= 64 else 64), 128 if size <= 128 else 80 if size <= 192 else 64


def backward_workspace(args: tuple[Any, ...], kwargs: Any, out: Any) -> tuple[int, ...]:
    """`mha_bwd`: two numbers per row, a float32 accumulator of dq and, under grouped queries, of dk and dv.

    Rows are rounded up with a block for each sequence, heads to 64, 96, 128, 192 or 256."""
    _, query, key, _, _, sequences = args
    size = next(most for most in (64, 96, 128, 192, 256) if query.shape[-1] <= most)
    of_queries, of_keys = _blocks(size)
    rows = round_up(query.shape[0] + sequences * of_queries, of_queries)
    taken = [query.shape[1] * rows * 4] * 2 + [query.shape[1] * rows * size * 4]
    if key.shape[1] != query.shape[1]:
        taken += [key.shape[1] * round_up(key.shape[0] + sequences * of_keys, of_keys) * size * 4] * 2
    return tuple(taken)


WORKSPACES = {torch.ops.autotune.flash3_varlen_backward.default: backward_workspace}
"""The row beside `workspaces.ON_CUDA`."""

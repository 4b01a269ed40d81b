"""`flash_attn_2_cuda` without its kernels: every call allocates what the compiled module allocates.

flash-attn imports this module, which takes an hour of nvcc to build. On emulated cards no kernel
computes, and its memory is the same. Written for `csrc/flash_attn/flash_api.cpp` of releases 2.7.0
and newer; the splits of a forward pass over few rows are left out.

The functions have the names and the argument order of the compiled module. Tensors of rows of equal
length are batch, row, head, size; those of packed rows are token, head, size.
"""

from __future__ import annotations

from typing import Any

import torch

# Rows by which a backward pass rounds up, in a packed batch once for each sequence
ROWS_PER_BLOCK = 128
HEAD_ROUNDING = 32  # numbers by which it rounds up a head


def fwd(q: Any, k: Any, v: Any, out: Any = None, *options: Any) -> list[Any]:
    """Attention over rows of equal length."""
    batch, rows, heads, _ = q.shape
    return _forward(q, out, logsumexp_shape=(batch, heads, rows))


def varlen_fwd(q: Any, k: Any, v: Any, out: Any, *options: Any) -> list[Any]:
    """Attention over packed rows."""
    tokens, heads, _ = q.shape
    return _forward(q, out, logsumexp_shape=(heads, tokens))


def fwd_kvcache(q: Any, *options: Any) -> list[Any]:
    """Compute one step of decoding with a cache."""
    output, logsumexp, *_ = fwd(q, None, None)
    return [output, logsumexp]


def _forward(
    q: Any,
    out: Any,
    logsumexp_shape: tuple[int, ...],
) -> list[Any]:
    """Return output, log-sum-exp, no probabilities, and the state of the random numbers."""
    output = torch.empty_like(q) if out is None else out
    logsumexp = q.new_empty(logsumexp_shape, dtype=torch.float32)
    probabilities = q.new_empty(0)
    random_state = q.new_empty(2, dtype=torch.int64)
    return [output, logsumexp, probabilities, random_state]


def bwd(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    *options: Any,
) -> list[Any]:
    """Backward pass of `fwd`."""
    batch, rows, heads, _ = q.shape
    rounded_rows = _round_up(rows, ROWS_PER_BLOCK)
    gradients = _gradients((q, k, v), (dq, dk, dv))
    softmax = q.new_empty((batch, heads, rounded_rows), dtype=torch.float32)
    _take_workspaces(q, k, rows_shape=(batch, rounded_rows))
    return [*gradients, softmax]


def varlen_bwd(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    sequence_starts: Any,
    *options: Any,
) -> list[Any]:
    """Backward pass of `varlen_fwd`."""
    tokens, heads, _ = q.shape
    sequences = sequence_starts.numel() - 1
    rounded_rows = tokens + ROWS_PER_BLOCK * sequences
    gradients = _gradients((q, k, v), (dq, dk, dv))
    softmax = q.new_empty((heads, rounded_rows), dtype=torch.float32)
    _take_workspaces(q, k, rows_shape=(rounded_rows,))
    return [*gradients, softmax]


def _gradients(operands: tuple[Any, ...], gradients: tuple[Any, ...]) -> list[Any]:
    """Return the gradients, each that the caller has not allocated as large as its operand."""
    allocated = []
    for operand, gradient in zip(operands, gradients):  # noqa: B905
        allocated.append(torch.empty_like(operand) if gradient is None else gradient)
    return allocated


def _take_workspaces(
    q: Any,
    k: Any,
    rows_shape: tuple[int, ...],
) -> None:
    """Allocate and free a float32 accumulator of dq, and under grouped queries dk and dv by query
    head.
    """
    query_heads, head_size = q.shape[-2:]
    accumulator_shape = (*rows_shape, query_heads, _round_up(head_size, HEAD_ROUNDING))
    workspaces = [q.new_empty(accumulator_shape, dtype=torch.float32)]
    if k.shape[-2] != query_heads:
        shape = (*k.shape[:-2], query_heads, k.shape[-1])
        workspaces += [k.new_empty(shape), k.new_empty(shape)]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step

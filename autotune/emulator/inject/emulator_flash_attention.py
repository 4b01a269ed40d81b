"""`flash_attn_2_cuda` without its kernels: every call allocates what the compiled module allocates.

flash-attn imports this module, which takes an hour of nvcc to build. On emulated cards no kernel
computes, and its memory is the same. Written for `csrc/flash_attn/flash_api.cpp` of releases 2.7.0
and newer; the splits of a forward pass over few rows are left out.
"""

from typing import Any

import torch

ROWS = 128  # rows by which a backward pass rounds up, in a packed batch once for each sequence


def _forward(q: Any, out: Any, rows: tuple[int, ...]) -> list[Any]:
    """Return output, log-sum-exp, no probabilities, and the state of the random numbers."""
    result = torch.empty_like(q) if out is None else out
    logsumexp = q.new_empty(rows, dtype=torch.float32)
    return [result, logsumexp, q.new_empty(0), q.new_empty(2, dtype=torch.int64)]


def fwd(q: Any, k: Any, v: Any, out: Any = None, *rest: Any) -> list[Any]:
    """Attention over rows of equal length: batch, row, head, size."""
    return _forward(q, out, (q.shape[0], q.shape[2], q.shape[1]))


def varlen_fwd(q: Any, k: Any, v: Any, out: Any, *rest: Any) -> list[Any]:
    """Attention over packed rows: token, head, size."""
    return _forward(q, out, (q.shape[1], q.shape[0]))


def _backward(
    given: tuple[Any, ...], softmax_rows: tuple[int, ...], rows: tuple[int, ...]
) -> list[Any]:
    """Return the gradients; a float32 accumulator of dq, and dk and dv by query head, are freed
    at the end.
    """
    q, k, v, dq, dk, dv = given
    gradients = [
        torch.empty_like(of) if one is None else one for one, of in ((dq, q), (dk, k), (dv, v))
    ]
    softmax = q.new_empty(softmax_rows, dtype=torch.float32)
    size = -(-q.shape[-1] // 32) * 32
    accumulator = q.new_empty((*rows, q.shape[-2], size), dtype=torch.float32)
    by_head = [
        k.new_empty((*k.shape[:-2], q.shape[-2], k.shape[-1]))
        for _ in range(2)
        if k.shape[-2] != q.shape[-2]
    ]
    del accumulator, by_head
    return [*gradients, softmax]


def bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, *rest: Any
) -> list[Any]:
    """Backward pass of `fwd`."""
    rows = -(-q.shape[1] // ROWS) * ROWS
    return _backward((q, k, v, dq, dk, dv), (q.shape[0], q.shape[2], rows), (q.shape[0], rows))


def varlen_bwd(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    starts: Any,
    *rest: Any,
) -> list[Any]:
    """Backward pass of `varlen_fwd`."""
    rows = q.shape[0] + ROWS * (starts.numel() - 1)
    return _backward((q, k, v, dq, dk, dv), (q.shape[1], rows), (rows,))


def fwd_kvcache(q: Any, *rest: Any) -> list[Any]:
    """One step of decoding with a cache."""
    return _forward(q, None, (q.shape[0], q.shape[2], q.shape[1]))[:2]

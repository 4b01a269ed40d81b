"""Attention over packed rows in plain torch, in place of the kernel that TRL's asynchronous
trainer fetches from the hub.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """Each sequence by itself; its last query sees its last key."""
    assert causal
    starts_q, starts_k, outputs = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), []
    assert max_seqlen_q == max(end - start for start, end in pairwise(starts_q))
    for at in range(len(starts_q) - 1):
        queries = q[starts_q[at] : starts_q[at + 1]].transpose(0, 1).unsqueeze(0)
        keys, values = (
            states[starts_k[at] : starts_k[at + 1]].transpose(0, 1).unsqueeze(0)
            for states in (k, v)
        )
        offset = keys.shape[2] - queries.shape[2]
        mask = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool, device=q.device).tril(
            offset
        )
        if window_size[0] >= 0:
            mask = mask & ~torch.ones_like(mask).tril(offset - window_size[0] - 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            scale=softmax_scale,
            enable_gqa=True,
        )
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def install() -> None:
    """Let the trainer run without a GPU, of which it asks the kernel and the name; nothing for a
    release without it.
    """
    try:
        from trl.experimental.async_grpo import async_grpo_trainer, packing
    except ImportError:
        return
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None

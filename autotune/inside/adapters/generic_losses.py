"""The policy's loss as frameworks for reinforcement learning compute it: the labels' log-probabilities, then a ratio.

They differ in how many copies of the logits live at a time, which decides the peak of large vocabularies:

- `logprobs`: log-softmax of the logits in float32.
- `logprobs_plain`: log-softmax in the logits' own precision.
- `logprobs_kernel`: a fused cross-entropy as flash-attn's, which keeps the logits and one figure per token; its gradient is as
  large as the logits, or with `in_place` written over them.

`completion_alone` says that the tokens before it have no logits, `widened` casts them to float32 first, `entropy` has the entropy
computed over the same logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

LOSSES = ("causal_lm", "logprobs", "logprobs_plain", "logprobs_kernel")


def policy_loss(out: Any, labels: Any, loss: str, options: Mapping[str, Any]) -> Any:
    """From the model's answer, which is emptied of its logits: no framework keeps them twice."""
    logits = out.logits
    out.logits = None
    if options.get("widened"):
        logits = logits.to(torch.float32)
    chosen = _chosen(logits, labels, loss, in_place=bool(options.get("in_place")))
    total = -torch.exp(chosen - chosen.detach()).mean()
    return total - 1e-3 * _entropy(logits).mean() if options.get("entropy") else total


def _chosen(logits: Any, labels: Any, loss: str, *, in_place: bool) -> Any:
    if loss == "logprobs_kernel":
        flat = logits.reshape(-1, logits.shape[-1])
        return _Kernel.apply(flat, torch.roll(labels, -1, 1).reshape(-1), in_place)
    logits = logits[:, :-1]
    wide = logits if loss == "logprobs_plain" else logits.float()
    return torch.log_softmax(wide, dim=-1).gather(-1, labels[:, 1:].unsqueeze(-1)).squeeze(-1)


def _entropy(logits: Any) -> Any:
    shares = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(shares * logits, dim=-1)


class _Kernel(torch.autograd.Function):  # type: ignore[misc]
    """A fused cross-entropy, by what it allocates."""

    @staticmethod
    def forward(context: Any, logits: Any, labels: Any, in_place: bool) -> Any:
        rows = logits.shape[0]
        losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
        sums = torch.empty(rows, dtype=torch.float32, device=logits.device)
        context.save_for_backward(logits, sums, labels)
        context.in_place = in_place
        return losses

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        logits, _, _ = context.saved_tensors
        return (logits.detach() if context.in_place else torch.empty_like(logits)), None, None

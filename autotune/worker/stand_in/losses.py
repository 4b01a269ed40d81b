"""Policy loss of reinforcement learning frameworks: log-probabilities of the labels, then a ratio.

The variants differ in the simultaneous copies of the logits, which decide the peak of large
vocabularies:

- `logprobs`: log-softmax of the logits in float32.
- `logprobs_plain`: log-softmax in the logits' own precision.
- `logprobs_kernel`: fused cross-entropy like flash-attn's. It keeps the logits and one figure per token; its
  gradient is as large as the logits, or overwrites them with `in_place`.

Options: `completion_alone` (no logits for the tokens before the completion), `widened` (cast to
float32 first), `entropy` (compute the entropy over the same logits), `entropy_chunk` (in float32 and in
parts of so many tokens, without a gradient unless `entropy_in_loss`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

LOSSES = ("causal_lm", "logprobs", "logprobs_plain", "logprobs_kernel")


def policy_loss(out: Any, labels: Any, loss: str, options: Mapping[str, Any]) -> Any:
    """Compute the loss from a model's output, and clear its logits, which are not kept twice."""
    logits = out.logits
    out.logits = None
    if options.get("widened"):
        logits = logits.to(torch.float32)
    chosen = _log_probabilities(logits, labels, loss, in_place=bool(options.get("in_place")))
    total = -torch.exp(chosen - chosen.detach()).mean()
    if not options.get("entropy"):
        return total
    if not options.get("entropy_chunk"):
        return total - 1e-3 * _entropy(logits).mean()
    with torch.set_grad_enabled(bool(options.get("entropy_in_loss")) and torch.is_grad_enabled()):
        entropy = _entropy_in_chunks(logits, int(options["entropy_chunk"]))
    return total - 1e-3 * entropy.mean()


def _log_probabilities(logits: Any, labels: Any, loss: str, *, in_place: bool) -> Any:
    if loss == "logprobs_kernel":
        flat = logits.reshape(-1, logits.shape[-1])
        return _FusedCrossEntropy.apply(flat, torch.roll(labels, -1, 1).reshape(-1), in_place)
    logits = logits[:, :-1]
    wide = logits if loss == "logprobs_plain" else logits.float()
    return torch.log_softmax(wide, dim=-1).gather(-1, labels[:, 1:].unsqueeze(-1)).squeeze(-1)


def _entropy(logits: Any) -> Any:
    # H = log(sum_v exp(l_v)) - sum_v p_v l_v   with p = softmax(l)
    shares = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(shares * logits, dim=-1)


def _entropy_in_chunks(logits: Any, tokens: int) -> Any:
    flat, found = logits.reshape(-1, logits.shape[-1]), []
    for part in flat.split(tokens):
        logs = torch.log_softmax(part.float(), dim=-1)
        found.append(-(logs.exp() * logs).sum(-1))
    return torch.cat(found)


class _FusedCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Allocations of a fused cross-entropy; its values are not computed."""

    @staticmethod
    def forward(context: Any, logits: Any, labels: Any, in_place: bool) -> Any:
        losses, sums = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2))
        context.save_for_backward(logits, sums, labels)
        context.in_place = in_place
        return losses

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        logits, _, _ = context.saved_tensors
        return (logits.detach() if context.in_place else torch.empty_like(logits)), None, None

"""Policy loss of reinforcement learning frameworks: log-probabilities of the labels, then a ratio.

The variants differ in the simultaneous copies of the logits, which decide the peak of large
vocabularies:

- `logprobs`: log-softmax of the logits in float32.
- `logprobs_plain`: log-softmax in the logits' own precision.
- `logprobs_kernel`: fused cross-entropy like flash-attn's. It keeps the logits and one figure per token; its
  gradient is as large as the logits, or overwrites them with `in_place`.

- `logprobs_fused`: the LM head's product and the log-probabilities in one function (`fused_head`), a
  `chunk` of tokens and a part of the vocabulary at a time; no logits are kept.

Options: `completion_alone` (no logits for the tokens before the completion), `widened` (cast to
float32 first), `entropy` (compute the entropy over the same logits), `entropy_chunk` (in float32 and in
parts of so many tokens, without a gradient unless `entropy_in_loss`), `each_row` (rows are slices of one
packed row, so that each row's gradient has the size of all logits).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

LOSSES = ("causal_lm", "logprobs", "logprobs_plain", "logprobs_kernel", "logprobs_fused")


def policy_loss(out: Any, labels: Any, loss: str, options: Mapping[str, Any]) -> Any:
    """Compute the loss from a model's output, and clear its logits, which are not kept twice."""
    logits = out.logits
    out.logits = None
    if loss == "logprobs_fused":  # the head has returned log-probabilities
        return -torch.exp(logits - logits.detach()).mean()
    if options.get("widened"):
        logits = logits.to(torch.float32)
    if options.get("each_row"):
        chosen = _in_slices(logits, labels, loss)
    else:
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


def _in_slices(logits: Any, labels: Any, loss: str) -> Any:
    rows, length = labels.shape
    packed = logits.reshape(1, rows * length, -1)
    slices = [packed[:, row * length : (row + 1) * length] for row in range(rows)]
    return torch.cat([_log_probabilities(part, labels[row : row + 1], loss, in_place=False) for row, part in enumerate(slices)])


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


VOCABULARY_PART = 8192
"""Words of one part (prime-rl 0.8.0, `trainer/models/layers/lm_head.py`)."""


def fuse_head(model: Any, chunk: int) -> None:
    """Replace the output layer's product by its fused log-probabilities. Their values are not computed."""
    head = model.get_output_embeddings()
    head.forward = lambda hidden: _FusedHead.apply(hidden, head.weight, chunk)


class _FusedHead(torch.autograd.Function):  # type: ignore[misc]
    """Allocations of an output layer whose log-probabilities are computed in chunks."""

    @staticmethod
    def forward(context: Any, hidden: Any, weight: Any, chunk: int) -> Any:
        context.save_for_backward(hidden, weight)
        context.chunk = chunk
        flat = hidden.reshape(-1, hidden.shape[-1])
        figures = [torch.empty(len(flat), dtype=torch.float32, device=flat.device) for _ in range(3)]
        for part in flat[:chunk].split(chunk):  # one chunk: the others take the same memory again
            _scaled(part, weight[:VOCABULARY_PART]).exp()
        return figures[0].reshape(hidden.shape[:-1])

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        hidden, weight = context.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if context.needs_input_grad[1] else None
        flat, part = hidden.reshape(-1, hidden.shape[-1])[: context.chunk], weight[:VOCABULARY_PART]
        shares = torch.exp(_scaled(flat, part))
        wide = shares * -1.0
        wide = wide * 1.0
        grad_hidden.view(-1, hidden.shape[-1])[: len(flat)].add_(wide.to(hidden.dtype) @ part)
        if grad_weight is not None:
            grad_weight[: len(part)].add_(wide.to(weight.dtype).t() @ flat)
        return grad_hidden, grad_weight, None


def _scaled(hidden: Any, weight: Any) -> Any:
    return (hidden @ weight.t()).to(torch.float32) * 1.0


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

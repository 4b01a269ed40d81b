"""Output layers fused with the log-probabilities: the allocations of each implementation, without its values.

No logits of a whole micro-batch exist. Each keeps the hidden states and a few figures per token.

- `vocabulary`: `chunk` tokens and a part of the vocabulary at a time (prime-rl 0.8.0,
  `trainer/models/layers/lm_head.py`).
- `tokens`: `chunk` tokens and the whole vocabulary at a time, in float32 (verl 0.9.1,
  `utils/experimental/torch_functional.py`).
- `kernel`: all tokens; figures for each part of the vocabulary, and gradients of one larger part at a time
  (verl 0.9.1, `utils/kernel/kernels.py`).
"""

from __future__ import annotations

from typing import Any

import torch

PRIME_PART, KERNEL_PART, KERNEL_GRADIENT_PART = 8192, 1024, 9504
"""Words of one part of the vocabulary."""

TOKENS = 512
"""Default of a chunk: that of verl's `FusedLinearForPPO`."""


def fuse_head(model: Any, options: Any) -> None:
    """Replace the output layer's product by its fused log-probabilities."""
    head, kind = model.get_output_embeddings(), HEADS[options.get("head", "vocabulary")]
    head.forward = lambda hidden: kind.apply(hidden, head.weight, int(options.get("chunk") or TOKENS))


class _FusedHead(torch.autograd.Function):  # type: ignore[misc]
    """Figures per token, then temporary tensors of a part: the other parts take the same memory again."""

    figures = 1

    @classmethod
    def forward_part(cls, flat: Any, weight: Any, chunk: int) -> None: ...

    @classmethod
    def backward_part(cls, flat: Any, weight: Any, grad_hidden: Any, grad_weight: Any, chunk: int) -> None: ...

    @classmethod
    def forward(cls, context: Any, hidden: Any, weight: Any, chunk: int) -> Any:
        context.save_for_backward(hidden, weight)
        context.chunk = chunk
        flat = hidden.reshape(-1, hidden.shape[-1])
        figures = [torch.empty(len(flat), dtype=torch.float32, device=flat.device) for _ in range(cls.figures)]
        cls.forward_part(flat, weight, chunk)
        return figures[0].reshape(hidden.shape[:-1])

    @classmethod
    def backward(cls, context: Any, gradient: Any) -> Any:
        hidden, weight = context.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if context.needs_input_grad[1] else None
        flat, own = hidden.reshape(-1, hidden.shape[-1]), grad_hidden.view(-1, hidden.shape[-1])
        cls.backward_part(flat, weight, own, grad_weight, context.chunk)
        return grad_hidden, grad_weight, None


class _VocabularyParts(_FusedHead):
    figures = 3

    @classmethod
    def forward_part(cls, flat: Any, weight: Any, chunk: int) -> None:
        for part in flat[:chunk].split(chunk):
            _scaled(part, weight[:PRIME_PART]).exp()

    @classmethod
    def backward_part(cls, flat: Any, weight: Any, grad_hidden: Any, grad_weight: Any, chunk: int) -> None:
        rows, part = flat[:chunk], weight[:PRIME_PART]
        shares = torch.exp(_scaled(rows, part))
        wide = shares * -1.0
        wide = wide * 1.0
        grad_hidden[: len(rows)].add_(wide.to(flat.dtype) @ part)
        if grad_weight is not None:
            grad_weight[: len(part)].add_(wide.to(weight.dtype).t() @ rows)


class _TokenChunks(_FusedHead):
    figures = 2

    @classmethod
    def forward_part(cls, flat: Any, weight: Any, chunk: int) -> None:
        logits = ((flat[:chunk] @ weight.t()) / 1.0).to(torch.float32)
        shares = logits.softmax(dim=-1)
        (shares * logits).sum(-1)

    @classmethod
    def backward_part(cls, flat: Any, weight: Any, grad_hidden: Any, grad_weight: Any, chunk: int) -> None:
        rows = flat[:chunk]
        logits = ((rows @ weight.t()) / 1.0).to(torch.float32)
        shares = logits.softmax(dim=-1)
        chosen = torch.zeros_like(logits)
        gradient = (1.0 * (chosen - shares)) + 0.0
        short = gradient.to(flat.dtype) / 1.0
        grad_rows, own = short @ weight, short.t() @ rows  # of frozen weights as well
        grad_hidden[: len(rows)].add_(grad_rows)
        if grad_weight is not None:
            grad_weight.add_(own)


class _Kernel(_FusedHead):
    figures = 5

    @classmethod
    def forward_part(cls, flat: Any, weight: Any, chunk: int) -> None:
        parts = -(-len(weight) // KERNEL_PART)
        _kept = [torch.empty((len(flat), parts), dtype=torch.float32, device=flat.device) for _ in range(3)]

    @classmethod
    def backward_part(cls, flat: Any, weight: Any, grad_hidden: Any, grad_weight: Any, chunk: int) -> None:
        own = torch.empty_like(weight) if grad_weight is None else grad_weight  # of frozen weights as well
        logits, part = flat.new_empty((len(flat), KERNEL_GRADIENT_PART)), weight[:KERNEL_GRADIENT_PART]
        if len(part) == KERNEL_GRADIENT_PART:
            grad_hidden.add_(logits @ part)
            own[: len(part)].copy_(logits.t() @ flat)


def _scaled(hidden: Any, weight: Any) -> Any:
    return (hidden @ weight.t()).to(torch.float32) * 1.0


HEADS = {"vocabulary": _VocabularyParts, "tokens": _TokenChunks, "kernel": _Kernel}

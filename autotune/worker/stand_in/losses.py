"""Policy loss of reinforcement learning frameworks: log-probabilities of the labels, then a ratio.

The variants differ in the simultaneous copies of the logits, which decide the peak of large
vocabularies:

- `logprobs`: log-softmax of the logits in float32.
- `logprobs_plain`: log-softmax in the logits' own precision.
- `logprobs_kernel`: fused cross-entropy like flash-attn's. It keeps the logits and one figure per token; its
  gradient is as large as the logits, or overwrites them with `in_place`.
- `logprobs_tokens`: log-softmax in float32 of one token after the other, each kept for the backward pass.
- `logprobs_fused`: the LM head's product and the log-probabilities in one function (`HEADS`); no logits are kept.

Options: `completion_alone` (no logits for the tokens before the completion), `widened` (cast to
float32 first), `copied` (of a copy of the logits, as when rows are cut out of padded ones),
`entropy` (the entropy over the same logits: `softmax`, or by torch.compile: `compiled`),
`entropy_chunk` (in float32, in chunks of this many tokens), `entropy_frozen` (without a gradient),
`entropy_widened` (a softmax under autocast, which computes it in float32), `each_row` (rows are
slices of one packed row, so that each row's gradient has the size of all logits), `held` (for an
entropy that is only logged: the logits, their log-softmax and a copy of this share of it, the
completions', stay until the loss is freed), `kernel_package` with `kernel_user` (the module with
the kernel, and the framework that uses it: where the second is installed and the first is not,
`logprobs_kernel` is `logprobs_tokens`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

PRIME_PART, KERNEL_PART, KERNEL_GRADIENT_PART = (
    8192,
    1024,
    9504,
)  # words of one part of the vocabulary
TOKENS = 512  # default of a chunk: that of verl's `FusedLinearForPPO`
LOSSES = (
    "causal_lm",
    "logprobs",
    "logprobs_plain",
    "logprobs_kernel",
    "logprobs_tokens",
    "logprobs_fused",
)


def policy_loss(out: Any, labels: Any, loss: str, options: Mapping[str, Any]) -> Any:
    """Compute the loss from a model's output, and clear its logits, which are not kept twice."""
    logits = out.logits
    out.logits = None
    if loss == "logprobs_fused":  # the head has returned log-probabilities
        return -torch.exp(logits - logits.detach()).mean()
    if options.get("widened"):
        logits = logits.to(torch.float32)
    package, user = options.get("kernel_package"), options.get("kernel_user")
    # An environment that has the framework is checked. In any other one, the kernel is assumed.
    if (
        loss == "logprobs_kernel"
        and package
        and user
        and find_spec(user)
        and not find_spec(package)
    ):
        loss = "logprobs_tokens"
    entropy = _entropy(logits, options)
    if options.get("each_row"):
        chosen = _in_slices(logits, labels, loss)
    else:
        rows = logits.clone() if options.get("copied") else logits
        chosen = _log_probabilities(rows, labels, loss, in_place=bool(options.get("in_place")))
    total = -torch.exp(chosen - chosen.detach()).mean()
    if share := options.get("held"):
        total = _holding(total, logits.detach(), float(share))
    return total if entropy is None else total - 1e-3 * entropy.mean()


def _holding(total: Any, logits: Any, share: float) -> Any:
    with torch.no_grad():
        logs = torch.log_softmax(logits[:, :-1], dim=-1)
        rows = logs.reshape(-1, logs.shape[-1])
        chosen = rows[: round(share * len(rows))].clone()
    return _Held.apply(total, logits, logs, chosen)


def _entropy(logits: Any, options: Mapping[str, Any]) -> Any:
    if not (kind := options.get("entropy")):
        return None
    with torch.set_grad_enabled(torch.is_grad_enabled() and not options.get("entropy_frozen")):
        if (
            options.get("entropy_widened")
            and kind == "softmax"
            and not options.get("entropy_chunk")
        ):
            shares = torch.softmax(logits.float(), dim=-1)
            return torch.logsumexp(logits.float(), dim=-1) - torch.sum(shares * logits, dim=-1)
        return ENTROPIES[kind](logits, int(options.get("entropy_chunk") or 0))


def _log_probabilities(logits: Any, labels: Any, loss: str, *, in_place: bool) -> Any:
    if loss == "logprobs_kernel":
        flat = logits.reshape(-1, logits.shape[-1])
        return _FusedCrossEntropy.apply(flat, torch.roll(labels, -1, 1).reshape(-1), in_place)
    if loss == "logprobs_tokens":
        following = torch.roll(labels, -1, 1).reshape(-1)
        pairs = zip(logits.reshape(-1, logits.shape[-1]), following, strict=True)
        return torch.stack(
            [
                torch.log_softmax(row.float(), dim=-1).gather(-1, label[None]).squeeze(-1)
                for row, label in pairs
            ]
        )
    logits = logits[:, :-1]
    wide = logits if loss == "logprobs_plain" else logits.float()
    return torch.log_softmax(wide, dim=-1).gather(-1, labels[:, 1:].unsqueeze(-1)).squeeze(-1)


def _in_slices(logits: Any, labels: Any, loss: str) -> Any:
    rows, length = labels.shape
    packed = logits.reshape(1, rows * length, -1)
    slices = [packed[:, row * length : (row + 1) * length] for row in range(rows)]
    return torch.cat(
        [
            _log_probabilities(part, labels[row : row + 1], loss, in_place=False)
            for row, part in enumerate(slices)
        ]
    )


def _by_softmax(logits: Any, chunk: int) -> Any:
    # H = log(sum_v exp(l_v)) - sum_v p_v l_v   with p = softmax(l)
    if chunk:
        return torch.cat(
            [
                _by_softmax(part.float(), 0)
                for part in logits.reshape(-1, logits.shape[-1]).split(chunk)
            ]
        )
    shares = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(shares * logits, dim=-1)


def _by_log_softmax(logits: Any, chunk: int) -> Any:
    found = []
    for part in logits.reshape(-1, logits.shape[-1]).split(chunk):
        logs = torch.log_softmax(part.float(), dim=-1)
        found.append(-(logs.exp() * logs).sum(-1))
    return torch.cat(found)


def _compiled(logits: Any, chunk: int) -> Any:
    """Allocate as the entropy that torch.compile generates for CUDA: the softmax is not stored,
    with chunks or without (`should_realize_on_reuse` in torch/_inductor/ir.py keeps it on CPUs
    alone).
    """
    return _FusedCrossEntropy.apply(
        logits.reshape(-1, logits.shape[-1]), logits.new_empty(0), False
    )


ENTROPIES = {"softmax": _by_softmax, "log_softmax": _by_log_softmax, "compiled": _compiled}


class _Held(torch.autograd.Function):  # type: ignore[misc]
    """A figure whose graph holds tensors, after the backward pass as well."""

    @staticmethod
    def forward(context: Any, total: Any, *tensors: Any) -> Any:
        context.tensors = tensors
        return total.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return gradient, *(None for _ in context.tensors)


class _FusedCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Allocations of a fused cross-entropy; its values are not computed."""

    @staticmethod
    def forward(context: Any, logits: Any, labels: Any, in_place: bool) -> Any:
        losses, sums = (
            torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
            for _ in range(2)
        )
        context.save_for_backward(logits, sums, labels)
        context.in_place = in_place
        return losses

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        logits, _, _ = context.saved_tensors
        return (logits.detach() if context.in_place else torch.empty_like(logits)), None, None


def fuse_head(model: Any, options: Any) -> None:
    """Replace the output layer's product by its log-probabilities: the allocations of an
    implementation, without its values.

    No logits of a whole micro-batch exist. Each keeps the hidden states and a few figures per
    token.

    - `vocabulary`: `chunk` tokens and a part of the vocabulary at a time (prime-rl 0.8.0,
      `trainer/models/layers/lm_head.py`).
    - `tokens`: `chunk` tokens and the whole vocabulary at a time, in float32 (verl 0.9.1,
      `utils/experimental/torch_functional.py`).
    - `kernel`: all tokens; figures for each part of the vocabulary, and gradients of one larger part at a time
      (verl 0.9.1, `utils/kernel/kernels.py`).
    """
    head, kind = model.get_output_embeddings(), HEADS[options.get("head", "vocabulary")]
    head.forward = lambda hidden: kind.apply(
        hidden, head.weight, int(options.get("chunk") or TOKENS)
    )


class _FusedHead(torch.autograd.Function):  # type: ignore[misc]
    """Figures per token, then temporary tensors of a part: the other parts take the same memory
    again.
    """

    figures = 1

    @classmethod
    def forward_part(cls, flat: Any, weight: Any, chunk: int) -> None: ...

    @classmethod
    def backward_part(
        cls, flat: Any, weight: Any, grad_hidden: Any, grad_weight: Any, chunk: int
    ) -> None: ...

    @classmethod
    def forward(cls, context: Any, hidden: Any, weight: Any, chunk: int) -> Any:
        context.save_for_backward(hidden, weight)
        context.chunk = chunk
        flat = hidden.reshape(-1, hidden.shape[-1])
        figures = [
            torch.empty(len(flat), dtype=torch.float32, device=flat.device)
            for _ in range(cls.figures)
        ]
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
    def backward_part(
        cls, flat: Any, weight: Any, grad_hidden: Any, grad_weight: Any, chunk: int
    ) -> None:
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
    def backward_part(
        cls, flat: Any, weight: Any, grad_hidden: Any, grad_weight: Any, chunk: int
    ) -> None:
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
        _kept = [
            torch.empty((len(flat), parts), dtype=torch.float32, device=flat.device)
            for _ in range(3)
        ]

    @classmethod
    def backward_part(
        cls, flat: Any, weight: Any, grad_hidden: Any, grad_weight: Any, chunk: int
    ) -> None:
        own = (
            torch.empty_like(weight) if grad_weight is None else grad_weight
        )  # of frozen weights as well
        logits, part = (
            flat.new_empty((len(flat), KERNEL_GRADIENT_PART)),
            weight[:KERNEL_GRADIENT_PART],
        )
        if len(part) == KERNEL_GRADIENT_PART:
            grad_hidden.add_(logits @ part)
            own[: len(part)].copy_(logits.t() @ flat)


def _scaled(hidden: Any, weight: Any) -> Any:
    return (hidden @ weight.t()).to(torch.float32) * 1.0


HEADS = {"vocabulary": _VocabularyParts, "tokens": _TokenChunks, "kernel": _Kernel}

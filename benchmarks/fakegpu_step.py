"""Patches that turn the generic step into the one that FakeGPU's table was measured with."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BLOCK, SCALE_BLOCK = 64, 256
"""Weights that share a scale, and scales that share one of the second level."""


def single_tensor_adamw(model: Any, spec: Any) -> None:
    """Update one parameter after the other (`foreach=False`)."""
    torch.optim.AdamW = functools.partial(torch.optim.AdamW, foreach=False)


def outputs_kept(model: Any, spec: Any) -> None:
    """Keep the last outputs, and with them the logits, until the next forward pass begins."""
    outputs: list[Any] = []
    model.register_forward_pre_hook(lambda module, inputs: outputs.clear())
    model.register_forward_hook(lambda module, inputs, out: outputs.append(out))


def packed_nf4(model: Any, spec: Any) -> Any:
    """Replace each linear layer but the head by 4-bit codes with an adapter in float32.

    Not bitsandbytes: a weight is restored by torch's own operators, in the forward and again in the
    backward pass.
    """
    settings = spec["settings"]["nf4"]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not head:
            parent, _, last = name.rpartition(".")
            setattr(
                model.get_submodule(parent),
                last,
                _Layer(module, settings["rank"], nested=settings["nested"]),
            )
    if spec["settings"]["gradient_checkpointing"]:
        model.enable_input_require_grads()
    return model


class _Layer(nn.Module):
    def __init__(
        self,
        linear: nn.Linear,
        rank: int,
        *,
        nested: bool,
    ) -> None:
        super().__init__()
        self.shape = linear.weight.shape
        blocks = linear.weight.numel() // BLOCK
        with torch.device("meta"):
            self.register_buffer(
                "codes", torch.empty(linear.weight.numel() // 2, dtype=torch.uint8)
            )
            self.register_buffer("pairs", torch.empty(256, 2, dtype=linear.weight.dtype))
            self.register_buffer(
                "scales", torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32)
            )
            if nested:
                self.register_buffer("coarse", torch.empty(-(-blocks // SCALE_BLOCK)))
                self.register_buffer("levels", torch.empty(256, 1))
                self.register_buffer("mean", torch.empty(()))
            self.down = nn.Parameter(torch.empty(rank, linear.in_features))
            self.up = nn.Parameter(torch.empty(linear.out_features, rank))
        self.nested = nested

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product = _Product.apply(inputs, self)
        added = functional.linear(functional.linear(inputs.to(self.down.dtype), self.down), self.up)
        return product + added.to(product.dtype) * 2.0

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Restore the weight by table look-ups."""
        scales = self._scales().to(dtype)
        values = self._looked_up(self.codes, self.pairs)
        return (values.view(-1, BLOCK) * scales.unsqueeze(1)).view(self.shape)

    def _scales(self) -> torch.Tensor:
        if not self.nested:
            return self.scales
        values = self._looked_up(self.scales, self.levels)
        return values.mul_(self.coarse.repeat_interleave(SCALE_BLOCK)[: len(values)]).add_(
            self.mean
        )

    @staticmethod
    def _looked_up(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return functional.embedding(codes.to(torch.int32), table).reshape(-1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        layer: _Layer,
    ) -> torch.Tensor:
        ctx.layer = layer
        return functional.linear(inputs, layer.weight(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None
        return gradient @ ctx.layer.weight(gradient.dtype), None

"""ZeRO-3's linear function, which saves its input always.

DeepSpeed replaces `torch.nn.functional.linear` (`memory_efficient_linear`, on by default; deepspeed/runtime/zero/linear.py)
by a function that saves its input. torch's own saves it for a weight gradient only, so beside frozen weights more is live here.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .patching import attribute


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, values: Any, weight: Any, bias: Any = None) -> Any:
        ctx.save_for_backward(values, weight, bias)
        if values.dim() == 2 and bias is not None:
            return torch.addmm(bias, values, weight.t())
        found = values.matmul(weight.t())
        if bias is not None:
            found += bias
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, Any, Any]:
        values, weight, bias = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = (*ctx.needs_input_grad, False, False)[:3]
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient.matmul(weight) if wants_input else None,
            rows.t().matmul(values.reshape(-1, values.shape[-1])) if wants_weight else None,
            rows.sum(0) if wants_bias and bias is not None else None,
        )


def _linear(values: Any, weight: Any, bias: Any = None) -> Any:
    return _Linear.apply(values, weight, bias)


def zero3_linear(spec: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Replace `linear` in ZeRO-3's steps."""
    is_zero3 = (spec.get("sharding") or {}).get("kind") == "zero3"
    return attribute(torch.nn.functional, "linear", _linear) if is_zero3 else nullcontext()

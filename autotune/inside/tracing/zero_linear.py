"""What ZeRO-3 keeps of every linear layer: its input, whether or not its weight trains.

DeepSpeed puts a function of its own in the place of `torch.nn.functional.linear` (`memory_efficient_linear`, on unless it is
switched off; deepspeed/runtime/zero/linear.py), which saves its input always. torch's own keeps that for a gradient of the
weight alone, so beside frozen weights more is alive here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .swap import attribute


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


@contextlib.contextmanager
def as_under_zero3(spec: Mapping[str, Any]) -> Iterator[None]:
    """Where the step is to be ZeRO-3's; elsewhere nothing changes."""
    if (spec.get("sharding") or {}).get("kind") != "zero3":
        yield
        return
    with attribute(torch.nn.functional, "linear", _linear):
        yield

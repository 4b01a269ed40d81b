"""Weights of a mixture's experts in float32, against sums worked out without transformers."""

from __future__ import annotations

from typing import Any

import torch

from autotune.worker.stand_in.expert_weights import weight_in_float32

TOKENS = 6
HIDDEN = 16


def block() -> Any:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    layer = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def largest_products(layer: Any) -> list[torch.dtype]:
    """Return the types of the products of outputs and weights, a row for each expert of a token."""
    types = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, _types, arguments=(), options=None):  # type: ignore
            out = function(*arguments, **(options or {}))
            if function is torch.ops.aten.mul.Tensor and out.shape == (2 * TOKENS, HIDDEN):
                types.append(out.dtype)
            return out

    with Seen():
        layer(
            torch.randn(
                1,
                TOKENS,
                HIDDEN,
                dtype=torch.bfloat16,
            )
        )
    return types


def test_outputs_are_multiplied_in_float32_and_in_the_models_type_without_it() -> None:
    layer = block()
    layer.experts.config._experts_implementation = "grouped_mm"
    assert largest_products(layer) == [torch.bfloat16]
    weight_in_float32(layer)
    assert largest_products(layer) == [torch.float32]

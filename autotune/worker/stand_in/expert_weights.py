"""Mixtures whose trainer weights the outputs of the experts in float32 (prime-rl).

transformers multiplies them with weights in the model's precision. With float32 weights the
products of all tokens and their experts are in float32 too, and so are their gradients:

    tokens x experts per token x hidden size x 4 bytes

Example: 65,536 tokens with 8 experts each of 2,048 take 4 GiB, and 2 GiB in bfloat16.
"""

from __future__ import annotations

from typing import Any


def weight_in_float32(model: Any) -> None:
    """Cast the weights of each layer's experts before they are used."""
    for module in model.modules():
        if hasattr(module, "num_experts") and hasattr(module, "down_proj"):
            module.register_forward_pre_hook(_with_float32_weights)


def _with_float32_weights(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, experts, weights = arguments
    return hidden, experts, weights.float()

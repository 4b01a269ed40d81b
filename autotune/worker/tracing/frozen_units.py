"""Inputs of frozen FSDP1 units, and their gradients, kept alive until the end of the backward pass.

A trainable unit is resharded when its gradients are ready. A frozen one has none, so FSDP registers
a hook on the gradients of its inputs (`_register_post_backward_reshard_only_hook` in
torch/distributed/fsdp/_runtime_utils.py). The hook keeps their graph nodes until the end of the
backward pass. Under reentrant checkpointing such an input is a leaf, and its node holds the
checkpointed hidden states and their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..decoder_layers import layers_of
from .step_annotator import differentiable


@contextmanager
def hooked(model: Any, spec: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """Hook frozen decoder layers under FSDP1. Call the yielded function after each backward."""
    held: dict[int, Any] = {}
    hooks = []
    if (spec.get("sharding") or {}).get("kind") == "fsdp1":
        frozen = [layer for layer in layers_of(model) if any(not parameter.requires_grad for parameter in layer.parameters())]
        hooks = [layer.register_forward_pre_hook(_hook_inputs(held), with_kwargs=True) for layer in frozen]

    def remove_hooks() -> None:
        for handle in held.values():
            handle.remove()
        held.clear()

    try:
        yield remove_hooks
    finally:
        remove_hooks()
        for hook in hooks:
            hook.remove()


def _hook_inputs(held: dict[int, Any]) -> Callable[..., None]:
    def before(layer: Any, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or id(layer) in held:
            return
        inputs = differentiable((args, kwargs))
        if inputs:
            held[id(layer)] = torch.autograd.graph.register_multi_grad_hook(inputs, _ignore)

    return before


def _ignore(gradients: Any) -> None: ...

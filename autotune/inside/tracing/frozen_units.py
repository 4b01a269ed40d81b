"""What FSDP1 keeps alive in a plain step: the inputs of frozen units, and their gradients, until the backward pass is over.

A unit that trains is cut again when its gradients are there. One that is frozen has none, so FSDP hangs a hook on the
gradients of its inputs (`_register_post_backward_reshard_only_hook` in torch/distributed/fsdp/_runtime_utils.py); the hook
holds on to their graph nodes, and is taken off only at the end of the backward pass. Under reentrant checkpointing such
an input is a leaf, whose node holds the checkpointed hidden states and their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .driver import layers_of


@contextmanager
def followed(model: Any, spec: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """Under FSDP1 the hooks hang on decoder layers with frozen parameters. Call what it yields after each backward pass."""
    held: dict[int, Any] = {}
    hooks = []
    if (spec.get("sharding") or {}).get("kind") == "fsdp1":
        frozen = [layer for layer in layers_of(model) if any(not parameter.requires_grad for parameter in layer.parameters())]
        hooks = [layer.register_forward_pre_hook(_hang_on(held), with_kwargs=True) for layer in frozen]

    def take_off() -> None:
        for handle in held.values():
            handle.remove()
        held.clear()

    try:
        yield take_off
    finally:
        take_off()
        for hook in hooks:
            hook.remove()


def _hang_on(held: dict[int, Any]) -> Callable[..., None]:
    def before(layer: Any, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or id(layer) in held:
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if inputs:
            held[id(layer)] = torch.autograd.graph.register_multi_grad_hook(inputs, _nothing)

    return before


def _nothing(gradients: Any) -> None: ...

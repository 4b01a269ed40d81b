"""When each module needs its parameters, and when each gradient is ready: what every kind of sharding hangs on.

Libraries that gather parameters just before use do it in hooks like these, module by module, in forward, in recomputation
and in backward. The hooks here change nothing: they write down where in the book the step was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

PASS, FORWARD, FORWARD_DONE, BACKWARD, BACKWARD_DONE, GRADIENT = range(6)
"""A pass begins at the root; a module begins and ends its forward, and its backward; a parameter has its gradient."""


class Uses:
    """The log of one trace."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger
        self.parameters: list[dict[str, Any]] = []
        self.modules: list[list[int]] = []
        """The parameters that each module holds itself, as indices; none for most, but libraries act at those as well."""
        self.uses: list[list[int]] = []
        """[event, what, module or parameter]; for a gradient also the number of its allocation."""
        self._handles: list[Any] = []

    def as_json(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "modules": self.modules, "uses": self.uses}

    def _note(self, what: int, which: int, *more: int) -> None:
        self.uses.append([len(self._ledger.events), what, which, *more])

    def watch(self, model: Any, tracker: Any, layer_of: dict[int, int] | None = None) -> None:
        """From here on; `layer_of` gives the decoder layer of a module, by the module's id."""
        index = self._inventory(model, tracker, layer_of or layers_of(model))
        self._handles.append(model.register_forward_pre_hook(lambda *_: self._note(PASS, 0)))
        for module in model.modules():
            held = [index[id(parameter)] for parameter in module._parameters.values() if parameter is not None]
            self.modules.append(held)
            self._follow(module, len(self.modules) - 1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._await_gradient(parameter, index[id(parameter)], tracker)

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _inventory(self, model: Any, tracker: Any, layer_of: dict[int, int]) -> dict[int, int]:
        index: dict[int, int] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is None or id(parameter) in index:
                    continue
                index[id(parameter)] = len(self.parameters)
                self.parameters.append(
                    {
                        "count": parameter.numel(),
                        "size": parameter.numel() * parameter.element_size(),
                        "trains": bool(parameter.requires_grad),
                        "layer": layer_of.get(id(module)),
                        "number": _number(tracker, parameter),
                    }
                )
        return index

    def _follow(self, module: Any, which: int) -> None:
        def before(_: Any, inputs: Any) -> None:
            self._note(FORWARD, which)
            if torch.is_grad_enabled() and (wanted := _differentiable(inputs)):
                self._after_all(wanted, which)

        def after(_: Any, __: Any, output: Any) -> None:
            self._note(FORWARD_DONE, which)
            for tensor in _differentiable(output):
                tensor.register_hook(begin)

        def begin(_: Any) -> None:
            self._note(BACKWARD, which)

        self._handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _after_all(self, tensors: list[Any], which: int) -> None:
        """Backward through the module is over when the last of its inputs has its gradient."""
        left = [len(tensors)]

        def done(_: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                self._note(BACKWARD_DONE, which)

        for tensor in tensors:
            tensor.register_hook(done)

    def _await_gradient(self, parameter: Any, which: int, tracker: Any) -> None:
        def ready(with_gradient: Any) -> None:
            number = _number(tracker, with_gradient.grad)
            self._note(GRADIENT, which, -1 if number is None else number)

        self._handles.append(parameter.register_post_accumulate_grad_hook(ready))


def _differentiable(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _number(tracker: Any, tensor: Any) -> int | None:
    if tensor is None:  # a fused kernel that gives no gradient for its weight
        return None
    booked = tracker._booked(tensor.untyped_storage())
    return None if booked is None else int(booked.number)


def layers_of(model: Any) -> dict[int, int]:
    """Every module inside the longest list of like modules, by its id, with its place in the list."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    layers = max(lists, key=len, default=())
    return {id(inner): place for place, layer in enumerate(layers) for inner in layer.modules()}


@contextmanager
def watched(model: Any, tracker: Any) -> Iterator[Uses]:
    """For as long as the step takes."""
    uses = Uses(tracker.ledger)
    uses.watch(model, tracker)
    try:
        yield uses
    finally:
        uses.stop()


def wanted(spec: Any) -> bool:
    """Sharding that is worked out afterwards, from where in the step each parameter and gradient is handled."""
    return (spec.get("sharding") or {}).get("kind") in ("ddp", "fsdp1", "zero1", "zero2", "zero3")

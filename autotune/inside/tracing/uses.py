"""When each module needs its parameters, and when each gradient is ready: what every kind of sharding hangs on.

Libraries that gather parameters just before use do it in hooks like these, module by module, in forward, in recomputation
and in backward. The hooks here change nothing: they write down where in the book the step was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

PASS, FORWARD, FORWARD_DONE, BACKWARD, BACKWARD_DONE, GRADIENT, READ = range(7)
"""A pass begins at the root; a module begins and ends its forward, and its backward; a parameter has its gradient, or is looked
at by the forward of another module than the one that holds it."""


class _Watched(dict):  # type: ignore[type-arg]
    """A module's parameters, which tell who takes one of them."""

    def __init__(self, held: dict[str, Any], taken: Callable[[Any], None]) -> None:
        super().__init__(held)
        self._taken = taken

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        self._taken(found)
        return found


class Uses:
    """The log of one trace."""

    def __init__(self, ledger: Any, *, own_inputs: bool = False) -> None:
        """`own_inputs`: each module's inputs are passed to it through a node of its own, as ZeRO-3 does it; so its backward is
        over when its own part of their gradients is there, whoever else takes the same tensors."""
        self._ledger, self._own_inputs = ledger, own_inputs
        self.parameters: list[dict[str, Any]] = []
        self.modules: list[list[int]] = []
        """The parameters that each module holds itself, as indices; none for most, but libraries act at those as well."""
        self.uses: list[list[int]] = []
        """[event, what, module or parameter]; for a gradient also the number of its allocation."""
        self._handles: list[Any] = []
        self._running: list[int] = []
        """Modules whose forward has begun, the innermost last."""
        self._plain: list[tuple[Any, Any]] = []
        self._keeps_recomputed = False

    def as_json(self) -> dict[str, Any]:
        found = {"parameters": self.parameters, "modules": self.modules, "uses": self.uses}
        return {**found, "keeps_recomputed": self._keeps_recomputed}

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
            self._look_at_reads(module, len(self.modules) - 1, index)
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._await_gradient(parameter, index[id(parameter)], tracker)

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, plain in self._plain:
            plain.update(module._parameters)
            module._parameters = plain
        self._plain.clear()

    def _look_at_reads(self, module: Any, which: int, index: dict[int, int]) -> None:
        """By whom its parameters are taken: an adapter's wrapper asks for the dtype of its matrices before they run."""

        def taken(parameter: Any) -> None:
            if self._running and self._running[-1] != which and id(parameter) in index:
                self._note(READ, index[id(parameter)])

        if module._parameters:
            self._plain.append((module, module._parameters))
            module._parameters = _Watched(module._parameters, taken)

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
        def before(_: Any, inputs: Any) -> Any:
            self._note(FORWARD, which)
            self._running.append(which)
            self._keeps_recomputed = self._keeps_recomputed or _keeps_what_it_recomputes()
            if torch.is_grad_enabled() and (wanted := _differentiable(inputs)):
                return self._through(inputs, wanted, which) if self._own_inputs else self._after_all(wanted, which)
            return None

        def after(_: Any, __: Any, output: Any) -> None:
            self._note(FORWARD_DONE, which)
            while self._running and self._running.pop() != which:
                pass  # recomputation ends as soon as it has all: what was inside of it never says that it is over
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

    def _through(self, inputs: Any, wanted: list[Any], which: int) -> Any:
        """The same, for gradients that go through nodes of the module's own."""
        left = [len(wanted)]

        def done() -> None:
            left[0] -= 1
            if left[0] == 0:
                self._note(BACKWARD_DONE, which)

        return tree_map(lambda leaf: _Turn.apply(leaf, done) if _differentiable(leaf) else leaf, inputs)

    def _await_gradient(self, parameter: Any, which: int, tracker: Any) -> None:
        def ready(with_gradient: Any) -> None:
            number = _number(tracker, with_gradient.grad)
            self._note(GRADIENT, which, -1 if number is None else number)

        self._handles.append(parameter.register_post_accumulate_grad_hook(ready))


class _Turn(torch.autograd.Function):  # type: ignore[misc]
    """A tensor as it is, and a word when its gradient has come back."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, then: Callable[[], None]) -> Any:
        ctx.then = then
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        ctx.then()
        return gradient, None


def _keeps_what_it_recomputes() -> bool:
    """Whether this is a recomputation that puts away, apart from the graph, what is saved in it."""
    return torch._C._current_graph_task_id() != -1 and _saved_elsewhere()


def _saved_elsewhere() -> bool:
    asked = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return asked is not None and asked(True) is not None


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


def of(spec: Any, ledger: Any) -> Uses:
    """As the library that shards would learn of them."""
    return Uses(ledger, own_inputs=(spec.get("sharding") or {}).get("kind") == "zero3")


def wanted(spec: Any) -> bool:
    """Sharding that is worked out afterwards, from where in the step each parameter and gradient is handled."""
    return (spec.get("sharding") or {}).get("kind") in ("ddp", "fsdp1", "zero1", "zero2", "zero3")

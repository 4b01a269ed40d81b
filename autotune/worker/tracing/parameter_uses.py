"""Sharding that is computed after the trace: uses of parameters and gradients by each module, and
what else differs in a step.

Libraries that gather parameters just before use do it in hooks like these, module by module, in
forward, recomputation and backward. The hooks here change nothing: they record positions in the
ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..model_memory import layers_of
from . import sharding_kind
from .annotators import differentiable
from .patching import attribute

KINDS = ("ddp", "fsdp1", "zero1", "zero2", "zero3")
"""Kinds of sharding that are computed from these uses."""

PASS, FORWARD, FORWARD_DONE, BACKWARD, BACKWARD_DONE, GRADIENT, READ = range(7)
"""Events: a pass begins at a root; a module's forward and backward begin and end; a parameter's
gradient is ready; a parameter is read by another module than its owner.
"""


class _ReadReportingDict(dict):  # type: ignore[type-arg]
    """Parameters of a module that report each read."""

    def __init__(self, held: dict[str, Any], taken: Callable[[Any], None]) -> None:
        super().__init__(held)
        self._taken = taken

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        self._taken(found)
        return found


class ParameterUses:
    """Log of one trace."""

    def __init__(self, ledger: Any, *, own_nodes: bool = False) -> None:
        """`own_nodes`: pass each module's inputs and outputs through nodes of its own, as ZeRO-3
        does.

        Its backward then ends when its own part of the inputs' gradients is ready, whatever other
        modules take the same tensors. Of modules that return the same tensor the outermost begins
        first.
        """
        self._ledger, self._own_nodes = ledger, own_nodes
        self.parameters: list[dict[str, Any]] = []
        self.modules: list[
            list[int]
        ] = []  # indices of the parameters that each module owns; empty for most
        self.uses: list[
            list[int]
        ] = []  # [event, kind, module or parameter]; for a gradient also its allocation's number
        self._running: list[int] = []  # modules whose forward is running, the innermost last
        self._left: dict[int, int] = {}  # gradients that each module's backward waits for
        self._index: dict[int, int] = {}
        self._keeps_recomputed = False

    def as_json(self) -> dict[str, Any]:
        found = {"parameters": self.parameters, "modules": self.modules, "uses": self.uses}
        return {**found, "keeps_recomputed": self._keeps_recomputed}

    def _note(self, what: int, which: int, *more: int) -> None:
        self.uses.append([len(self._ledger.events), what, which, *more])

    def watch(self, model: Any, tracker: Any, *, trains: bool = True) -> None:
        """Record from now on. Of several models the first one is the policy.

        `trains`: False for a model that no optimizer has.
        """
        index, root = self._inventory(model, tracker, trains=trains), len(self.modules)
        self._index |= index
        model.register_forward_pre_hook(lambda *_: self._note(PASS, root))
        for module in model.modules():
            held = [
                index[id(parameter)]
                for parameter in module._parameters.values()
                if parameter is not None
            ]
            self.modules.append(held)
            self._record_passes(module, len(self.modules) - 1)
            self._record_reads(module, len(self.modules) - 1, index)

        def ready(parameter: Any) -> None:
            number = _number(tracker, parameter.grad)
            self._note(GRADIENT, index[id(parameter)], -1 if number is None else number)

        for parameter in model.parameters():
            if trains and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(ready)

    def note_groups(self, groups: list[dict[str, Any]]) -> None:
        """Record the optimizer's group of each parameter. DeepSpeed drops groups without
        parameters.
        """
        held = [
            [self._index[id(one)] for one in group["params"] if id(one) in self._index]
            for group in groups
        ]
        for number, group in enumerate(group for group in held if group):
            for index in group:
                self.parameters[index]["group"] = number

    def _record_reads(self, module: Any, which: int, index: dict[int, int]) -> None:
        """Record reads by other modules: an adapter's wrapper reads the dtype of its matrices."""

        def taken(parameter: Any) -> None:
            if self._running and self._running[-1] != which and id(parameter) in index:
                self._note(READ, index[id(parameter)])

        if module._parameters:
            module._parameters = _ReadReportingDict(module._parameters, taken)

    def _inventory(self, model: Any, tracker: Any, *, trains: bool) -> dict[int, int]:
        index: dict[int, int] = {}
        layer_of = {
            id(inner): place
            for place, layer in enumerate(layers_of(model))
            for inner in layer.modules()
        }
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is None or id(parameter) in index:
                    continue
                index[id(parameter)] = len(self.parameters)
                self.parameters.append(
                    {
                        "count": parameter.numel(),
                        "size": parameter.nbytes,
                        "trains": trains and bool(parameter.requires_grad),
                        "layer": layer_of.get(id(module)),
                        "number": _number(tracker, parameter),
                    }
                )
        return index

    def _record_passes(self, module: Any, which: int) -> None:
        def before(_: Any, inputs: Any) -> Any:
            self._note(FORWARD, which)
            self._running.append(which)
            self._keeps_recomputed = self._keeps_recomputed or _keeps_recomputed_tensors()
            if self._own_nodes:
                return self._through(inputs, which)
            if torch.is_grad_enabled() and (wanted := differentiable(inputs)):
                self._after_all(wanted, which)
            return None

        def after(_: Any, __: Any, output: Any) -> Any:
            self._note(FORWARD_DONE, which)
            while self._running and self._running.pop() != which:
                pass  # recomputation stops early: modules inside may not end
            if self._own_nodes:
                return _with_nodes(output, begin)
            for tensor in differentiable(output):
                tensor.register_hook(begin)
            return None

        def begin(*_: Any) -> None:
            self._note(BACKWARD, which)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _after_all(self, tensors: list[Any], which: int) -> None:
        """Record the end of the module's backward: the last of its inputs has its gradient."""
        left = [len(tensors)]

        def done(_: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                self._note(BACKWARD_DONE, which)

        for tensor in tensors:
            tensor.register_hook(done)

    def _through(self, inputs: Any, which: int) -> Any:
        """Record the same for gradients that pass through nodes of the module's own.

        The module counts them, and each of its forwards counts anew (`ds_grads_remaining` in
        deepspeed/runtime/zero/parameter_offload.py). After a pass without gradients between its
        forward and its backward, as for a reference without the adapter, its backward never ends.
        """
        self._left[which] = 0

        def done() -> None:
            self._left[which] -= 1
            if self._left[which] == 0:
                self._note(BACKWARD_DONE, which)

        def counted(tensor: Any) -> None:
            self._left[which] += 1

        if torch.is_grad_enabled():
            return _with_nodes(inputs, done, counted)
        self._left[which] = len(differentiable(inputs))
        return None


class _GradientCallback(torch.autograd.Function):  # type: ignore[misc]
    """Identity with a callback after the gradient's return."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, then: Callable[[], None]) -> Any:
        ctx.then = then
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        ctx.then()
        return gradient, None


def _with_nodes(
    values: Any, then: Callable[[], None], made: Callable[[Any], None] = lambda tensor: None
) -> Any:
    """Pass tensors that require gradients through nodes that call `then`.

    Containers are those of `apply_to_tensors_only` (deepspeed/runtime/zero/utils.py); dictionaries
    are changed in place.
    """
    if isinstance(values, torch.Tensor):
        if not values.requires_grad:
            return values
        made(values)
        return _GradientCallback.apply(values, then)
    if isinstance(values, dict):
        for name in list(values):
            values[name] = _with_nodes(values[name], then, made)
        return values
    if isinstance(values, (tuple, list)):
        several = [_with_nodes(value, then, made) for value in values]
        return type(values)(*several) if hasattr(values, "_fields") else type(values)(several)
    return values


def _keeps_recomputed_tensors() -> bool:
    """Return True in a recomputation whose saved tensors are stored outside the graph."""
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return (
        torch._C._current_graph_task_id() != -1
        and top_hooks is not None
        and top_hooks(True) is not None
    )


def _number(tracker: Any, tensor: Any) -> int | None:
    if tensor is None:  # a fused kernel without a gradient for its weight
        return None
    number: int | None = tracker.number_of(tensor)
    return number


@contextmanager
def frozen_units_hooked(model: Any, spec: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """Hook frozen decoder layers under FSDP1. Call the yielded function after each backward.

    A trainable unit is resharded when its gradients are ready. A frozen one has none, so FSDP
    registers a hook on the gradients of its inputs (`_register_post_backward_reshard_only_hook` in
    torch/distributed/fsdp/_runtime_utils.py). The hook keeps their graph nodes until the end of the
    backward pass. Under reentrant checkpointing such an input is a leaf, and its node holds the
    checkpointed hidden states and their gradient.
    """
    held: dict[int, Any] = {}

    def hold(layer: Any, args: Any, kwargs: Any) -> None:
        if (
            torch.is_grad_enabled()
            and id(layer) not in held
            and (inputs := differentiable((args, kwargs)))
        ):
            held[id(layer)] = torch.autograd.graph.register_multi_grad_hook(
                inputs, lambda gradients: None
            )

    def remove_hooks() -> None:
        for handle in held.values():
            handle.remove()
        held.clear()

    hooks = []
    if sharding_kind(spec) == "fsdp1":
        frozen = [
            layer
            for layer in layers_of(model)
            if any(not parameter.requires_grad for parameter in layer.parameters())
        ]
        hooks = [layer.register_forward_pre_hook(hold, with_kwargs=True) for layer in frozen]
    try:
        yield remove_hooks
    finally:
        remove_hooks()
        for hook in hooks:
            hook.remove()


class _SavingLinear(torch.autograd.Function):  # type: ignore[misc]
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


def zero3_linear(spec: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Replace `torch.nn.functional.linear` in ZeRO-3's steps, as DeepSpeed does
    (`memory_efficient_linear`, on by default).

    Its function (deepspeed/runtime/zero/linear.py) always saves its input. torch's own saves it for
    a weight gradient only, so beside frozen weights more is live here.
    """

    def linear(values: Any, weight: Any, bias: Any = None) -> Any:
        return _SavingLinear.apply(values, weight, bias)

    return (
        attribute(torch.nn.functional, "linear", linear)
        if sharding_kind(spec) == "zero3"
        else nullcontext()
    )

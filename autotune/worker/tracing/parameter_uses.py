"""Sharding that is computed after the trace: uses of parameters and gradients by each module, and
what else differs in a step.

Libraries that gather parameters just before use do it in hooks like these, module by module, in
forward, recomputation and backward. The hooks here change nothing: they record positions in the
ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..model_memory import layers_of
from ..protocol import Result
from . import Spec, sharding_kind
from .annotators import differentiable
from .patching import attribute

SHARDING_KINDS = ("ddp", "fsdp1", "zero1", "zero2", "zero3")
"""Kinds of sharding that are computed from these uses."""

PASS, FORWARD, FORWARD_DONE, BACKWARD, BACKWARD_DONE, GRADIENT, READ = range(7)
"""Events: a pass begins at a root; a module's forward and backward begin and end; a parameter's
gradient is ready; a parameter is read by another module than its owner.
"""


# 1. The log.


class _ReadReportingDict(dict):  # type: ignore[type-arg]
    """Parameters of a module that report each read."""

    def __init__(self, parameters: dict[str, Any], report: Callable[[Any], None]) -> None:
        super().__init__(parameters)
        self._report = report

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self._report(parameter)
        return parameter


class ParameterUses:
    """Log of one trace."""

    def __init__(self, ledger: Any, *, own_nodes: bool = False) -> None:
        """`own_nodes`: pass each module's inputs and outputs through nodes of its own, as ZeRO-3
        does.

        Its backward then ends when its own part of the inputs' gradients is ready, whatever other
        modules take the same tensors. Of modules that return the same tensor the outermost begins
        first.
        """
        self._ledger = ledger
        self._own_nodes = own_nodes
        self.parameters: list[Result] = []
        self.modules: list[list[int]] = []
        """Indices of the parameters that each module owns; empty for most."""
        self.uses: list[list[int]] = []
        """[event, kind, module or parameter]; for a gradient also its allocation's number."""
        self._index_by_id: dict[int, int] = {}
        """Index of each watched parameter."""
        self._running: list[int] = []
        """Modules whose forward is running, the innermost last."""
        self._pending_gradients: dict[int, int] = {}
        """Gradients that each module's backward waits for."""
        self._keeps_recomputed = False

    def as_json(self) -> Result:
        return {
            "parameters": self.parameters,
            "modules": self.modules,
            "uses": self.uses,
            "keeps_recomputed": self._keeps_recomputed,
        }

    def _note(self, kind: int, index: int, *details: int) -> None:
        position = len(self._ledger.events)
        self.uses.append([position, kind, index, *details])

    def watch(
        self,
        model: Any,
        tracker: Any,
        *,
        trains: bool = True,
    ) -> None:
        """Record from now on. Of several models the first one is the policy.

        `trains`: False for a model that no optimizer has.
        """
        # 1. Passes and reads.
        index_by_id = self._add_parameters(model, tracker, trains=trains)
        self._index_by_id |= index_by_id
        root = len(self.modules)
        model.register_forward_pre_hook(lambda *_: self._note(PASS, root))
        for module in model.modules():
            self._watch_module(module, index_by_id)

        # 2. Gradients.
        def gradient_ready(parameter: Any) -> None:
            number = None
            if parameter.grad is not None:  # a fused kernel has none for its weight
                number = tracker.number_of(parameter.grad)
            index = index_by_id[id(parameter)]
            self._note(GRADIENT, index, -1 if number is None else number)

        for parameter in model.parameters():
            if trains and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(gradient_ready)

    def note_groups(self, groups: list[dict[str, Any]]) -> None:
        """Record the optimizer's group of each parameter. DeepSpeed drops groups without
        parameters.
        """
        number = 0
        for group in groups:
            watched = [
                self._index_by_id[id(parameter)]
                for parameter in group["params"]
                if id(parameter) in self._index_by_id
            ]
            for index in watched:
                self.parameters[index]["group"] = number
            if watched:
                number += 1

    def _add_parameters(
        self,
        model: Any,
        tracker: Any,
        *,
        trains: bool,
    ) -> dict[int, int]:
        """Describe the model's parameters, and return their indices by id."""
        layer_by_module: dict[int, int] = {}
        for layer_number, layer in enumerate(layers_of(model)):
            for module in layer.modules():
                layer_by_module[id(module)] = layer_number

        index_by_id: dict[int, int] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is None or id(parameter) in index_by_id:
                    continue
                index_by_id[id(parameter)] = len(self.parameters)
                self.parameters.append(
                    {
                        "count": parameter.numel(),
                        "size": parameter.nbytes,
                        "trains": trains and bool(parameter.requires_grad),
                        "layer": layer_by_module.get(id(module)),
                        "number": tracker.number_of(parameter),
                    }
                )
        return index_by_id

    def _watch_module(self, module: Any, index_by_id: dict[int, int]) -> None:
        number = len(self.modules)
        parameters = [
            parameter for parameter in module._parameters.values() if parameter is not None
        ]
        self.modules.append([index_by_id[id(parameter)] for parameter in parameters])
        self._record_passes(module, number)
        self._record_reads(module, number, index_by_id)

    def _record_reads(
        self,
        module: Any,
        number: int,
        index_by_id: dict[int, int],
    ) -> None:
        """Record reads by other modules: an adapter's wrapper reads the dtype of its matrices."""

        def read(parameter: Any) -> None:
            is_foreign = bool(self._running) and self._running[-1] != number
            if is_foreign and id(parameter) in index_by_id:
                self._note(READ, index_by_id[id(parameter)])

        if module._parameters:
            module._parameters = _ReadReportingDict(module._parameters, read)

    def _record_passes(self, module: Any, number: int) -> None:
        def forward_begins(_: Any, inputs: Any) -> Any:
            self._note(FORWARD, number)
            self._running.append(number)
            self._keeps_recomputed = self._keeps_recomputed or _keeps_recomputed_tensors()
            if self._own_nodes:
                return self._through_nodes(inputs, number)
            if torch.is_grad_enabled():
                self._record_end_of_backward(differentiable(inputs), number)
            return None

        def forward_ends(
            _: Any,
            __: Any,
            output: Any,
        ) -> Any:
            self._note(FORWARD_DONE, number)
            while self._running and self._running.pop() != number:
                pass  # recomputation stops early: modules inside may not end
            if self._own_nodes:
                return _with_nodes(output, backward_begins)
            for tensor in differentiable(output):
                tensor.register_hook(backward_begins)
            return None

        def backward_begins(*_: Any) -> None:
            self._note(BACKWARD, number)

        module.register_forward_pre_hook(forward_begins)
        module.register_forward_hook(forward_ends)

    def _record_end_of_backward(self, inputs: list[Any], number: int) -> None:
        """Record the end of the module's backward: the last of its inputs has its gradient."""
        pending = len(inputs)

        def gradient_ready(_: Any) -> None:
            nonlocal pending
            pending -= 1
            if pending == 0:
                self._note(BACKWARD_DONE, number)

        for tensor in inputs:
            tensor.register_hook(gradient_ready)

    def _through_nodes(self, inputs: Any, number: int) -> Any:
        """Record the same for gradients that pass through nodes of the module's own.

        The module counts them, and each of its forwards counts anew (`ds_grads_remaining` in
        deepspeed/runtime/zero/parameter_offload.py). After a pass without gradients between its
        forward and its backward, as for a reference without the adapter, its backward never ends.
        """
        pending = self._pending_gradients
        if not torch.is_grad_enabled():
            pending[number] = len(differentiable(inputs))
            return None

        def node_added(tensor: Any) -> None:
            pending[number] += 1

        def gradient_ready() -> None:
            pending[number] -= 1
            if pending[number] == 0:
                self._note(BACKWARD_DONE, number)

        pending[number] = 0
        return _with_nodes(inputs, gradient_ready, node_added)


# 2. Nodes of a module in the graph.


class _GradientCallback(torch.autograd.Function):  # type: ignore[misc]
    """Identity with a callback after the gradient's return."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Any,
        callback: Callable[[], None],
    ) -> Any:
        ctx.callback = callback
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        ctx.callback()
        return gradient, None


def _with_nodes(
    values: Any,
    callback: Callable[[], None],
    node_added: Callable[[Any], None] | None = None,
) -> Any:
    """Pass tensors that require gradients through nodes that call `callback`.

    Containers are those of `apply_to_tensors_only` (deepspeed/runtime/zero/utils.py); dictionaries
    are changed in place.
    """
    if isinstance(values, torch.Tensor):
        if not values.requires_grad:
            return values
        if node_added is not None:
            node_added(values)
        return _GradientCallback.apply(values, callback)
    if isinstance(values, dict):
        for name in list(values):
            values[name] = _with_nodes(values[name], callback, node_added)
        return values
    if isinstance(values, (tuple, list)):
        items = [_with_nodes(value, callback, node_added) for value in values]
        is_named_tuple = hasattr(values, "_fields")
        return type(values)(*items) if is_named_tuple else type(values)(items)
    return values


def _keeps_recomputed_tensors() -> bool:
    """Return True in a recomputation whose saved tensors are stored outside the graph."""
    if torch._C._current_graph_task_id() == -1:
        return False
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top_hooks is not None and top_hooks(True) is not None


# 3. Other differences of a sharded step.


@contextmanager
def frozen_units_hooked(model: Any, spec: Spec) -> Iterator[Callable[[], None]]:
    """Hook frozen decoder layers under FSDP1. Call the yielded function after each backward.

    A trainable unit is resharded when its gradients are ready. A frozen one has none, so FSDP
    registers a hook on the gradients of its inputs (`_register_post_backward_reshard_only_hook` in
    torch/distributed/fsdp/_runtime_utils.py). The hook keeps their graph nodes until the end of the
    backward pass. Under reentrant checkpointing such an input is a leaf, and its node holds the
    checkpointed hidden states and their gradient.
    """
    handles: dict[int, Any] = {}

    def hook_inputs(
        layer: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        if not torch.is_grad_enabled() or id(layer) in handles:
            return
        inputs = differentiable((args, kwargs))
        if inputs:
            handles[id(layer)] = torch.autograd.graph.register_multi_grad_hook(
                inputs, lambda gradients: None
            )

    def remove_handles() -> None:
        for handle in handles.values():
            handle.remove()
        handles.clear()

    layers = layers_of(model) if sharding_kind(spec) == "fsdp1" else []
    hooks = []
    for layer in layers:
        if any(not parameter.requires_grad for parameter in layer.parameters()):
            hooks.append(layer.register_forward_pre_hook(hook_inputs, with_kwargs=True))
    try:
        yield remove_handles
    finally:
        remove_handles()
        for hook in hooks:
            hook.remove()


class _SavingLinear(torch.autograd.Function):  # type: ignore[misc]
    """Linear layer that always saves its input."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Any,
        weight: Any,
        bias: Any = None,
    ) -> Any:
        ctx.save_for_backward(values, weight, bias)
        if values.dim() == 2 and bias is not None:
            return torch.addmm(bias, values, weight.t())
        product = values.matmul(weight.t())
        if bias is not None:
            product += bias
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, Any, Any]:
        values, weight, bias = ctx.saved_tensors
        needs_values, needs_weight, needs_bias = (*ctx.needs_input_grad, False, False)[:3]
        rows = gradient.reshape(-1, gradient.shape[-1])
        values_gradient = weight_gradient = bias_gradient = None
        if needs_values:
            values_gradient = gradient.matmul(weight)
        if needs_weight:
            weight_gradient = rows.t().matmul(values.reshape(-1, values.shape[-1]))
        if needs_bias and bias is not None:
            bias_gradient = rows.sum(0)
        return values_gradient, weight_gradient, bias_gradient


def zero3_linear(spec: Spec) -> AbstractContextManager[None]:
    """Replace `torch.nn.functional.linear` in ZeRO-3's steps, as DeepSpeed does
    (`memory_efficient_linear`, on by default).

    Its function (deepspeed/runtime/zero/linear.py) always saves its input. torch's own saves it for
    a weight gradient only, so beside frozen weights more is live here.
    """
    if sharding_kind(spec) != "zero3":
        return nullcontext()

    def linear(
        values: Any,
        weight: Any,
        bias: Any = None,
    ) -> Any:
        return _SavingLinear.apply(values, weight, bias)

    return attribute(torch.nn.functional, "linear", linear)

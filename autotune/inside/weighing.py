"""What each model of this process holds, summed up from its real tensors: nothing here is reckoned from a shape.

A part has the name that it has in a prediction: the policy's are plain (`weights`, `adapters`, `gradients`, `optimizer`), another
model's stand under its role (`reference_weights`); `_on_host` is added where they lie on the host beside a GPU. Storages are
counted, each once and whole, so that a shard's padding counts and a view does not. What is no tensor of a model is in none of
them: activations, a wrapper's own buffers, an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
"""DeepSpeed's float32 copies under ZeRO-3, and below it."""

PARTITIONED_GRADIENTS = ("averaged_gradients", "grad_partitions_flat_buffer")


@dataclass
class Held:
    """A model, by the role that somebody keeps it for."""

    role: str
    """Empty is the policy."""

    model: Any
    optimizer: Any = None
    """What trains it, wrapped as it may be. One that trains several belongs to the last of them."""


def weigh(held: Iterable[Held], device: str) -> dict[str, int]:
    """Right after an optimizer's step it is all there at once: the gradients still, its states already."""
    return _weighed(list(held), device, _Counted())


def weigh_all(held: Iterable[Held], device: str, modules: Iterable[Any]) -> dict[str, int]:
    """The same, and of further modules what belongs to none of these models, as `other`."""
    counted = _Counted()
    found = _weighed(list(held), device, counted)
    return {**found, **_weighed([Held(role="other", model=module) for module in modules], device, counted)}


def _weighed(held: list[Held], device: str, counted: _Counted) -> dict[str, int]:
    import torch

    scale = _Scale(device, counted)
    with torch.no_grad():
        for one in held:
            _add_model(scale, one)
        left_to = {id(one.optimizer): one for one in held if one.optimizer is not None}
        for one in left_to.values():
            _add_rest_of_the_optimizer(scale, one)
    return scale.found


def part(role: str, name: str) -> str:
    return f"{role}_{name}" if role else name


def _add_model(scale: _Scale, held: Held) -> None:
    parameters, optimizer = list(held.model.parameters()), _innermost(held.optimizer)
    scale.add(part(held.role, "gradients"), [parameter.grad for parameter in parameters])
    adapted = any(hasattr(module, "peft_config") for module in held.model.modules())
    for parameter in parameters:
        name = "adapters" if adapted and parameter.requires_grad else "weights"
        scale.add(part(held.role, name), list(_of_a_parameter(parameter)))
        scale.add(part(held.role, "optimizer"), _state_of(optimizer, parameter))
    scale.add(part(held.role, "weights"), list(held.model.buffers()))


def _add_rest_of_the_optimizer(scale: _Scale, held: Held) -> None:
    """What is kept for all parameters together."""
    gradients, states, inner = part(held.role, "gradients"), part(held.role, "optimizer"), _innermost(held.optimizer)
    for layer in _layers(held.optimizer):
        scale.add(gradients, [getattr(layer, name, None) for name in PARTITIONED_GRADIENTS])
        masters = [getattr(layer, name, None) for name in MASTERS]
        scale.add(gradients, [one.grad for one in _tensors(masters) if one.is_leaf])
        scale.add(states, masters)
    scale.add(states, list(getattr(inner, "state", {}).values()))
    scale.add(states, [group["params"] for group in getattr(inner, "param_groups", ())])


def _of_a_parameter(parameter: Any) -> Iterator[Any]:
    """Itself, the part that DeepSpeed left of it here, and what bitsandbytes reads its 4 bits by."""
    yield parameter
    yield getattr(parameter, "ds_tensor", None)
    quantised = getattr(parameter, "quant_state", None)
    while quantised is not None:
        yield list(getattr(quantised, "__dict__", {}).values())
        quantised = getattr(quantised, "state2", None)


def _layers(optimizer: Any) -> Iterator[Any]:
    """accelerate's, DeepSpeed's, and the one that does the sums: each around the next."""
    while optimizer is not None:
        yield optimizer
        inner = getattr(optimizer, "optimizer", None)
        optimizer = None if inner is optimizer else inner


def _innermost(optimizer: Any) -> Any:
    return list(_layers(optimizer))[-1] if optimizer is not None else None


def _state_of(optimizer: Any, parameter: Any) -> list[Any]:
    state = getattr(optimizer, "state", None)
    return [state[parameter]] if state and parameter in state else []


def _tensors(value: Any) -> Iterator[Any]:
    """All tensors in lists and mappings, each as it lies here."""
    if hasattr(value, "untyped_storage"):
        yield value.to_local() if hasattr(value, "to_local") else value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


class _Counted(set[tuple[str, int]]):
    """Storages that are in some part already, by where they begin."""


class _Scale:
    """Bytes by part."""

    def __init__(self, device: str, counted: _Counted) -> None:
        self._device, self._counted = device, counted
        self.found: dict[str, int] = {}

    def add(self, name: str, values: list[Any]) -> None:
        for tensor in _tensors(values):
            kind = tensor.device.type
            if kind == "meta" or not tensor.dim():  # Adam's count of its steps is no part of anything
                continue
            storage = tensor.untyped_storage()
            where = (str(tensor.device), storage.data_ptr())
            if not storage.nbytes() or where in self._counted:
                continue
            self._counted.add(where)
            lies = name if kind == self._device else f"{name}_on_host"
            self.found[lies] = self.found.get(lies, 0) + int(storage.nbytes())

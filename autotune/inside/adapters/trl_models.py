"""What each model of a trainer holds on this rank, summed up from its real tensors: nothing here is reckoned from a shape.

A part has the name that it has in a prediction: the policy's are plain (`weights`, `adapters`, `gradients`, `optimizer`), another
model's stand under its role (`reference_weights`); `_on_host` is added where they lie on the host beside a GPU. Storages are
counted, each once and whole, so that a shard's padding counts and a view does not. What is no tensor of a model is in none of
them: activations, a wrapper's own buffers, an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

OTHERS = (("critic", "value_model"), ("reference", "ref_model"), ("reward", "reward_model"))
"""Roles, and the trainer's own names for them."""

MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
"""DeepSpeed's float32 copies under ZeRO-3, and below it."""

PARTITIONED_GRADIENTS = ("averaged_gradients", "grad_partitions_flat_buffer")


def weigh(trainer: Any) -> dict[str, int]:
    """Right after an optimizer's step it is all there at once: the gradients still, its states already."""
    import torch

    scale = _Scale(trainer.accelerator.device.type)
    optimizer = _innermost(trainer.optimizer)
    with torch.no_grad():
        for role, model in _models(trainer):
            parameters = list(model.parameters())
            scale.add(f"{role}gradients", [parameter.grad for parameter in parameters])
            adapted = hasattr(model, "peft_config")
            for parameter in parameters:
                part = "adapters" if adapted and parameter.requires_grad else "weights"
                scale.add(f"{role}{part}", list(_of_a_parameter(parameter)))
                scale.add(f"{role}optimizer", _state_of(optimizer, parameter))
            scale.add(f"{role}weights", list(model.buffers()))
        for layer in _layers(trainer.optimizer):  # what is kept for all parameters together is the policy's
            scale.add("gradients", [getattr(layer, name, None) for name in PARTITIONED_GRADIENTS])
            masters = [getattr(layer, name, None) for name in MASTERS]
            scale.add("gradients", [one.grad for one in _tensors(masters) if one.is_leaf])
            scale.add("optimizer", masters)
        scale.add("optimizer", list(getattr(optimizer, "state", {}).values()))
        scale.add("optimizer", [group["params"] for group in getattr(optimizer, "param_groups", ())])
    return scale.found


def _models(trainer: Any) -> Iterator[tuple[str, Any]]:
    """The policy last: what others share with it is theirs too, and nobody's twice."""
    unwrap = trainer.accelerator.unwrap_model
    for role, name in OTHERS:
        model = getattr(trainer, name, None)
        if hasattr(model, "parameters"):
            yield f"{role}_", unwrap(model)
    for reward in getattr(trainer, "reward_funcs", None) or ():
        if hasattr(reward, "parameters"):
            yield "reward_", unwrap(reward)
    yield "", policy_of(trainer)


def policy_of(trainer: Any) -> Any:
    """What is trained; PPO's trainer has it in one module with its critic."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return getattr(model, "policy", model)


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


class _Scale:
    """Bytes by part."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._seen: set[tuple[str, int]] = set()
        self.found: dict[str, int] = {}

    def add(self, part: str, values: list[Any]) -> None:
        for tensor in _tensors(values):
            kind = tensor.device.type
            if kind == "meta" or not tensor.dim():  # Adam's count of its steps is no part of anything
                continue
            storage = tensor.untyped_storage()
            where = (str(tensor.device), storage.data_ptr())
            if not storage.nbytes() or where in self._seen:
                continue
            self._seen.add(where)
            name = part if kind == self._device else f"{part}_on_host"
            self.found[name] = self.found.get(name, 0) + int(storage.nbytes())

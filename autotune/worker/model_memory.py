"""Bytes of each model of this process.

Part names equal those of a prediction: plain for the policy (`weights`, `adapters`, `gradients`,
`optimizer`), with the role as prefix for other models (`reference_weights`), with the suffix
`_on_host` for tensors on the host beside a GPU. Storages count once and whole, so the padding of a
shard counts and a view does not. Not included: activations, a wrapper's own buffers, an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

# DeepSpeed's float32 copies under ZeRO-3, and under ZeRO-1 and -2.
MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
PARTITIONED_GRADIENTS = ("averaged_gradients", "grad_partitions_flat_buffer")
TOWERS = frozenset({"visual", "vision_tower", "vision_model", "audio_tower"})
OTHER_ROLE = "other"


class ModelBytes(NamedTuple):
    """Model to measure, with its role and its optimizer."""

    role: str  # empty for the policy
    model: Any
    # Its optimizer, wrapped or not. One that trains several models counts for the last of them.
    optimizer: Any = None


def layers_of(model: Any) -> list[Any]:
    """Return the longest ModuleList outside towers; empty without one."""
    import torch

    lists = []
    for name, module in model.named_modules():
        is_in_tower = not TOWERS.isdisjoint(name.split("."))
        if isinstance(module, torch.nn.ModuleList) and not is_in_tower:
            lists.append(list(module))
    return max(lists, key=len, default=[])


def sum_up(
    models: Iterable[ModelBytes],
    device: str,
    unassigned: Iterable[Any] = (),
) -> dict[str, int]:
    """Return bytes by part. `unassigned` modules count as `other`, without tensors of `models`.

    Right after an optimizer step everything exists at once: gradients and optimizer states.
    """
    import torch

    totals = _Totals(device)
    other_models = [ModelBytes(role=OTHER_ROLE, model=module) for module in unassigned]
    with torch.no_grad():
        _add_models(totals, list(models))
        _add_models(totals, other_models)
    return totals.bytes_by_part


def _add_models(totals: _Totals, models: list[ModelBytes]) -> None:
    last_of_optimizer = {}
    for model_bytes in models:
        _add_model(totals, model_bytes)
        if model_bytes.optimizer is not None:
            last_of_optimizer[id(model_bytes.optimizer)] = model_bytes
    for role, _, optimizer in last_of_optimizer.values():
        _add_shared_optimizer_state(totals, role, optimizer)


def _add_model(totals: _Totals, model_bytes: ModelBytes) -> None:
    role, model, optimizer = model_bytes
    parameters = list(model.parameters())
    has_adapter = any(hasattr(module, "peft_config") for module in model.modules())
    state: Any = None
    for inner in _layers(optimizer):
        state = getattr(inner, "state", None)

    gradients = [parameter.grad for parameter in parameters]
    totals.add(role, "gradients", gradients)
    for parameter in parameters:
        is_adapter = has_adapter and parameter.requires_grad
        part = "adapters" if is_adapter else "weights"
        tensors = list(_tensors_of_parameter(parameter))
        totals.add(role, part, tensors)
        if state and parameter in state:
            totals.add(role, "optimizer", state[parameter])
    buffers = list(model.buffers())
    totals.add(role, "weights", buffers)


def _add_shared_optimizer_state(
    totals: _Totals,
    role: str,
    optimizer: Any,
) -> None:
    """Add the tensors that an optimizer keeps for all parameters together."""
    inner = None
    for inner in _layers(optimizer):
        gradients = [getattr(inner, name, None) for name in PARTITIONED_GRADIENTS]
        masters = [getattr(inner, name, None) for name in MASTERS]
        for master in _tensors(masters):
            if master.is_leaf:
                gradients.append(master.grad)
        totals.add(role, "gradients", gradients)
        totals.add(role, "optimizer", masters)
    state = getattr(inner, "state", {})
    totals.add(role, "optimizer", list(state.values()))
    for group in getattr(inner, "param_groups", ()):
        totals.add(role, "optimizer", group["params"])


def _tensors_of_parameter(parameter: Any) -> Iterator[Any]:
    """Yield the parameter, DeepSpeed's local shard of it, and bitsandbytes' quantisation state."""
    yield parameter
    yield getattr(parameter, "ds_tensor", None)
    quantisation = getattr(parameter, "quant_state", None)
    while quantisation is not None:
        attributes = getattr(quantisation, "__dict__", {})
        yield list(attributes.values())
        quantisation = getattr(quantisation, "state2", None)


def _layers(optimizer: Any) -> Iterator[Any]:
    """Yield accelerate's wrapper, DeepSpeed's, and the innermost optimizer."""
    while optimizer is not None:
        yield optimizer
        inner = getattr(optimizer, "optimizer", None)
        optimizer = None if inner is optimizer else inner


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the local part of each tensor in nested lists and mappings."""
    if hasattr(value, "untyped_storage"):
        yield value.to_local() if hasattr(value, "to_local") else value
    elif isinstance(value, dict):
        for member in value.values():
            yield from _tensors(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)


class _Totals:
    """Bytes by part, each storage counted once."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._counted: set[tuple[str, int]] = set()  # device and address of storages
        self.bytes_by_part: dict[str, int] = {}

    def add(
        self,
        role: str,
        name: str,
        values: Any,
    ) -> None:
        """Add the tensors in these nested values to a part of the role's model."""
        part = f"{role}_{name}" if role else name
        for tensor in _tensors(values):
            size = self._new_bytes(tensor)
            if size:
                is_beside = tensor.device.type != self._device
                key = f"{part}_on_host" if is_beside else part
                before = self.bytes_by_part.get(key, 0)
                self.bytes_by_part[key] = before + size

    def _new_bytes(self, tensor: Any) -> int:
        """Return the size of the tensor's storage; 0 if it is counted already, or does not."""
        is_scalar = not tensor.dim()  # Adam's step counters
        if tensor.device.type == "meta" or is_scalar:
            return 0
        storage = tensor.untyped_storage()
        address = (str(tensor.device), storage.data_ptr())
        if not storage.nbytes() or address in self._counted:
            return 0
        self._counted.add(address)
        return int(storage.nbytes())

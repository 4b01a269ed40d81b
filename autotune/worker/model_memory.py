"""Bytes of each model of this process, summed over its real tensors.

Part names equal those of a prediction: plain for the policy (`weights`, `adapters`, `gradients`,
`optimizer`), with the role as prefix for other models (`reference_weights`), with the suffix
`_on_host` for tensors on the host beside a GPU. Storages count once and whole, so the padding of a
shard counts and a view does not. Not included: activations, a wrapper's own buffers, an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# DeepSpeed's float32 copies under ZeRO-3, and under ZeRO-1 and -2.
MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
PARTITIONED_GRADIENTS = ("averaged_gradients", "grad_partitions_flat_buffer")


@dataclass
class ModelBytes:
    """Model to measure, with its role and its optimizer."""

    role: str  # empty for the policy
    model: Any
    # Its optimizer, wrapped or not. One that trains several models counts for the last of them.
    optimizer: Any = None


def sum_up(models: Iterable[ModelBytes], device: str, others: Iterable[Any] = ()) -> dict[str, int]:
    """Return bytes by part. Modules in `others` count as `other`, without the tensors of `models`.

    Right after an optimizer step everything exists at once: gradients and optimizer states.
    """
    import torch

    totals = _Totals(device)
    models = list(models)
    with torch.no_grad():
        for group in (models, [ModelBytes(role="other", model=module) for module in others]):
            for one in group:
                _add_model(totals, one)
            for one in {id(one.optimizer): one for one in group if one.optimizer is not None}.values():
                _add_shared_optimizer_state(totals, one)
    return totals.found


def _add_model(totals: _Totals, one: ModelBytes) -> None:
    parameters, optimizers = list(one.model.parameters()), list(_layers(one.optimizer))
    state = getattr(optimizers[-1], "state", None) if optimizers else None
    totals.add(one.role, "gradients", [parameter.grad for parameter in parameters])
    adapted = any(hasattr(module, "peft_config") for module in one.model.modules())
    for parameter in parameters:
        name = "adapters" if adapted and parameter.requires_grad else "weights"
        totals.add(one.role, name, list(_of_parameter(parameter)))
        if state and parameter in state:
            totals.add(one.role, "optimizer", [state[parameter]])
    totals.add(one.role, "weights", list(one.model.buffers()))


def _add_shared_optimizer_state(totals: _Totals, one: ModelBytes) -> None:
    """Add the tensors that an optimizer keeps for all parameters together."""
    inner = None
    for inner in _layers(one.optimizer):
        totals.add(one.role, "gradients", [getattr(inner, name, None) for name in PARTITIONED_GRADIENTS])
        masters = [getattr(inner, name, None) for name in MASTERS]
        totals.add(one.role, "gradients", [tensor.grad for tensor in _tensors(masters) if tensor.is_leaf])
        totals.add(one.role, "optimizer", masters)
    totals.add(one.role, "optimizer", list(getattr(inner, "state", {}).values()))
    totals.add(one.role, "optimizer", [group["params"] for group in getattr(inner, "param_groups", ())])


def _of_parameter(parameter: Any) -> Iterator[Any]:
    """Yield the parameter, DeepSpeed's local shard of it, and bitsandbytes' quantisation state."""
    yield parameter
    yield getattr(parameter, "ds_tensor", None)
    quantised = getattr(parameter, "quant_state", None)
    while quantised is not None:
        yield list(getattr(quantised, "__dict__", {}).values())
        quantised = getattr(quantised, "state2", None)


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
    elif isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)


class _Totals:
    """Bytes by part, each storage counted once."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._counted: set[tuple[str, int]] = set()
        self.found: dict[str, int] = {}

    def add(self, role: str, name: str, values: list[Any]) -> None:
        named = f"{role}_{name}" if role else name
        for tensor in _tensors(values):
            kind = tensor.device.type
            if kind == "meta" or not tensor.dim():  # scalars: Adam's step counters
                continue
            storage = tensor.untyped_storage()
            address = (str(tensor.device), storage.data_ptr())
            if not storage.nbytes() or address in self._counted:
                continue
            self._counted.add(address)
            part = named if kind == self._device else f"{named}_on_host"
            self.found[part] = self.found.get(part, 0) + int(storage.nbytes())

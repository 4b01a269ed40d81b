"""Traces on fake CPU tensors that make a CUDA device's choices.

Fake *CPU* tensors work with any build of torch and need no compiler. CUDA's choices are reproduced
where they differ from the CPU's: operations that autocast widens (`autocast`), attention kernels
and their saved tensors (`attention`), tensors that an operation saves (`kernels`), memory inside
kernels (`workspaces`), and the batched (`foreach`) paths of optimizers and clipping.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils.flop_counter import flop_registry

from . import (
    Spec,
    attention,
    autocast,
    bitsandbytes_optimizers,
    capability,
    kernels,
    quantised,
    traced_gpu,
)
from .patching import all_entered, attribute, swapped

_BATCHED_UPDATES = (optimizer, _foreach_utils)
"""Modules of torch that decide whether an update is batched."""

_UNCOUNTED_PRODUCTS = (
    ("aten", "_int_mm"),
    ("aten", "_grouped_mm"),
    ("transformers", "grouped_mm_fallback"),
)
"""Products that torch's counter of FLOPs lacks, by namespace and name."""


@all_entered
def as_on_cuda(spec: Spec) -> Iterator[AbstractContextManager[None]]:
    """Apply CUDA's choices to the trainer's construction and steps; none for a CPU."""
    yield plain_tensors()
    yield quantised.unpacked_by_peft()
    if spec.get("device", "cuda") != "cuda":
        return
    # 1. torch.
    yield traced_gpu(spec)
    yield autocast.follow_cuda()
    yield attention.dot_product_as_on_cuda()
    yield kernels.operations_as_on_cuda()
    yield _updates_are_batched()
    yield _gpu_described()
    yield half_precision_trains()
    yield _products_counted()
    # 2. Libraries.
    yield kernels.triton_of_trl()
    yield kernels.checks_as_on_cuda(
        "transformers", lambda name: name == "transformers.integrations.moe"
    )
    yield kernels.attention_on_cuda()
    yield attention.flash_package_installed()
    yield kernels.liger_installed(spec)
    settings = spec.get("settings", {})
    optimizer_name = str(settings.get("optim", ""))
    if bitsandbytes_optimizers.is_bitsandbytes(optimizer_name):
        yield bitsandbytes_optimizers.installed()


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Let optimizers and clipping batch fake tensors, as they do plain ones."""
    # Both modules may have the same list.
    supported = {
        id(module._foreach_supported_types): module._foreach_supported_types
        for module in _BATCHED_UPDATES
    }
    for types in supported.values():
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in supported.values():
            types.remove(FakeTensor)


@all_entered
def _updates_are_batched() -> Iterator[AbstractContextManager[None]]:
    """Batch updates by default, as on CUDA: temporaries are as large as the parameters."""
    name = "_get_foreach_kernels_supported_devices"

    def with_cpu(devices_of_torch: Any) -> Any:
        return lambda: [*devices_of_torch(), "cpu"]

    for module in _BATCHED_UPDATES:
        yield attribute(module, name, with_cpu(vars(module)[name]))


@all_entered
def _gpu_described() -> Iterator[AbstractContextManager[None]]:
    """Answer frameworks' checks for the traced GPU, except `torch.cuda.is_available`: the tensors
    are on the CPU, and no code may reach for a GPU.
    """
    yield attribute(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: capability() >= (8, 0))
    yield attribute(torch.cuda, "get_device_capability", lambda *args, **kwargs: capability())


@all_entered
def half_precision_trains() -> Iterator[AbstractContextManager[None]]:
    """Enable float16 autocast with a gradient scaler; accelerate disables it on a CPU."""
    module = sys.modules.get("accelerate.accelerator")
    accelerator = getattr(module, "Accelerator", None)
    if accelerator is None:
        return
    init_of_accelerate = accelerator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        init_of_accelerate(self, *args, **kwargs)
        distributed_type = str(self.distributed_type).rpartition(".")[2]
        if str(self.mixed_precision) == "fp16" and distributed_type != "DEEPSPEED":
            self.native_amp = True
            self.scaler = self.scaler or _Scaler()

    yield attribute(accelerator, "__init__", init)


class _Scaler:
    """Gradient scaler of a step without overflow: one product on the loss, two numbers of state."""

    def scale(self, loss: Any) -> Any:
        return loss * torch.ones((), dtype=torch.float32, device=loss.device)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    def unscale_(self, optimizer: Any) -> None: ...  # in place
    def update(self, new_scale: Any = None) -> None: ...

    def get_scale(self) -> float:
        return 1.0

    def is_enabled(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}


@all_entered
def _products_counted() -> Iterator[AbstractContextManager[None]]:
    for namespace, name in _UNCOUNTED_PRODUCTS:
        operations = getattr(torch.ops, namespace)
        packet = getattr(operations, name, None)
        if packet is not None and packet not in flop_registry:
            yield swapped(flop_registry, packet, _product_flops)


def _product_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a product: 2 x rows x inner dimension x columns; groups share the
    rows.
    """
    rows, inner = left.shape[-2:]
    columns = right.shape[-1]
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return int(2 * groups * rows * inner * columns)

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
    attention,
    autocast,
    bitsandbytes_optimizers,
    capability,
    kernels,
    quantised,
    traced_gpu,
)
from .patching import all_entered, attribute, swapped


@all_entered
def as_on_cuda(spec: Any) -> Iterator[AbstractContextManager[None]]:
    """Apply CUDA's choices to the trainer's construction and steps; none for a CPU."""
    yield plain_tensors()
    yield quantised.unpacked_by_peft()
    if spec.get("device", "cuda") != "cuda":
        return
    yield traced_gpu(spec)
    yield autocast.follow_cuda()
    yield attention.dot_product_as_on_cuda()
    yield kernels.operations_as_on_cuda()
    for module in (
        optimizer,
        _foreach_utils,
    ):  # updates are batched by default: temporaries are as large as the parameters
        devices = vars(module)["_get_foreach_kernels_supported_devices"]
        yield attribute(
            module,
            "_get_foreach_kernels_supported_devices",
            lambda devices=devices: [*devices(), "cpu"],
        )
    # Frameworks' checks are answered for the traced GPU, except `torch.cuda.is_available`: the
    # tensors are on the CPU, and no code may reach for a GPU.
    yield attribute(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: capability() >= (8, 0))
    yield attribute(torch.cuda, "get_device_capability", lambda *args, **kwargs: capability())
    yield half_precision_trains()
    for space, name in (
        ("aten", "_int_mm"),
        ("aten", "_grouped_mm"),
        ("transformers", "grouped_mm_fallback"),
    ):
        packet = getattr(
            getattr(torch.ops, space), name, None
        )  # products that torch's counter lacks
        if packet is not None and packet not in flop_registry:
            yield swapped(flop_registry, packet, _work)
    yield kernels.triton_of_trl()
    yield kernels.checks_as_on_cuda(
        "transformers", lambda name: name == "transformers.integrations.moe"
    )
    yield kernels.attention_on_cuda()
    yield attention.flash_package_installed()
    yield kernels.liger_installed(spec)
    if bitsandbytes_optimizers.is_bitsandbytes(str(spec.get("settings", {}).get("optim", ""))):
        yield bitsandbytes_optimizers.installed()


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Let optimizers and clipping batch fake tensors, as they do plain ones."""
    lists = {
        id(module._foreach_supported_types): module._foreach_supported_types
        for module in (optimizer, _foreach_utils)
    }
    for types in lists.values():
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in lists.values():
            types.remove(FakeTensor)


@all_entered
def half_precision_trains() -> Iterator[AbstractContextManager[None]]:
    """Enable float16 autocast with a gradient scaler; accelerate disables it on a CPU."""
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if accelerator is None:
        return
    begin = accelerator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if (
            str(self.mixed_precision) == "fp16"
            and str(self.distributed_type).rpartition(".")[2] != "DEEPSPEED"
        ):
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


def _work(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a product: 2 x rows x inner dimension x columns; groups share the
    rows.
    """
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return int(2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1])

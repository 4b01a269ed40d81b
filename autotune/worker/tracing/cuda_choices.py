"""Traces on fake CPU tensors that make a CUDA device's choices.

Fake *CPU* tensors work with any build of torch and need no compiler. CUDA's choices are reproduced
where they differ from the CPU's: operations that autocast widens (`autocast`), attention kernels
and their saved tensors (`attention`, `flash_attention`), tensors that an operation saves
(`kernels`), memory inside kernels (`workspaces`), and the batched (`foreach`) paths of optimizers
and clipping.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import (
    attention,
    autocast,
    bitsandbytes_optimizers,
    cuda_device_checks,
    flash_attention,
    flash_attention_3,
    kernels,
    liger,
    quantised,
    traced_gpu,
    workspaces,
)
from .patching import attribute, swapped

WORKSPACES = workspaces.ON_CUDA
"""Table for `Tracker(workspaces=...)`, sized for the GPU of the specification in `as_on_cuda`."""


@contextmanager
def as_on_cuda(spec: Any) -> Iterator[None]:
    """Apply CUDA's choices to the trainer's construction and steps; none for a CPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(plain_tensors())
        stack.enter_context(quantised.unpacked_by_peft())
        if spec.get("device", "cuda") == "cuda":
            stack.enter_context(traced_gpu.of(spec))
            for follow in (autocast.follow_cuda, attention.follow_cuda, kernels.follow_cuda):
                stack.enter_context(follow())
            stack.enter_context(batched_updates())
            stack.enter_context(checks_pass())
            stack.enter_context(half_precision_trains())
            stack.enter_context(products_counted())
            stack.enter_context(kernels.triton_of_trl())
            stack.enter_context(cuda_device_checks.on_cuda("transformers", lambda name: name == "transformers.integrations.moe"))
            stack.enter_context(cuda_device_checks.attention_on_cuda())
            stack.enter_context(flash_attention.installed())
            stack.enter_context(liger.installed(spec))
            if bitsandbytes_optimizers.is_bitsandbytes(str(spec.get("settings", {}).get("optim", ""))):
                stack.enter_context(bitsandbytes_optimizers.installed())
        yield


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Let optimizers and clipping batch fake tensors, as they do plain ones."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    lists = {id(module._foreach_supported_types): module._foreach_supported_types for module in (optimizer, _foreach_utils)}
    for types in lists.values():
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in lists.values():
            types.remove(FakeTensor)


@contextmanager
def batched_updates() -> Iterator[None]:
    """Batch updates by default (`foreach`): temporaries are as large as the parameters."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    with contextlib.ExitStack() as stack:
        for module in (optimizer, _foreach_utils):
            devices = vars(module)["_get_foreach_kernels_supported_devices"]
            stack.enter_context(
                swapped(vars(module), "_get_foreach_kernels_supported_devices", lambda devices=devices: [*devices(), "cpu"])
            )
        yield


@contextmanager
def checks_pass() -> Iterator[None]:
    """Answer frameworks' checks of the GPU for the traced GPU.

    `torch.cuda.is_available` is unchanged: the tensors are on the CPU, and no code may reach for a
    GPU.
    """
    with (
        attribute(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: traced_gpu.capability() >= (8, 0)),
        attribute(torch.cuda, "get_device_capability", lambda *args, **kwargs: traced_gpu.capability()),
    ):
        yield


def workspaces_for(spec: Any) -> Any:
    """Return the table of workspaces for the specification's device."""
    if spec.get("device", "cuda") != "cuda":
        return workspaces.ON_ANY_DEVICE
    return {**WORKSPACES, **flash_attention_3.workspaces()}


@contextmanager
def half_precision_trains() -> Iterator[None]:
    """Enable float16 autocast with a gradient scaler; accelerate disables it on a CPU."""
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if accelerator is None:
        yield
        return
    begin = accelerator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if str(self.mixed_precision) == "fp16" and str(self.distributed_type).rpartition(".")[2] != "DEEPSPEED":
            self.native_amp = True
            self.scaler = self.scaler or _Scaler()

    with attribute(accelerator, "__init__", init):
        yield


class _Scaler:
    """Gradient scaler of a step without overflow: one product on the loss, two numbers of state."""

    def scale(self, loss: Any) -> Any:
        return loss * torch.ones((), dtype=torch.float32, device=loss.device)

    def unscale_(self, optimizer: Any) -> None:
        """No allocation: it works in place."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """No allocation."""

    def get_scale(self) -> float:
        return 1.0

    def is_enabled(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}


@contextmanager
def products_counted() -> Iterator[None]:
    """Register products that torch's counter lacks: 8-bit integers and grouped ones."""
    from torch.utils import flop_counter

    named = [("aten", "_int_mm"), ("aten", "_grouped_mm"), ("transformers", "grouped_mm_fallback")]
    packets = [getattr(getattr(torch.ops, space), name, None) for space, name in named]
    added = [packet for packet in packets if packet is not None and packet not in flop_counter.flop_registry]
    for packet in added:
        flop_counter.flop_registry[packet] = _work
    try:
        yield
    finally:
        for packet in added:
            del flop_counter.flop_registry[packet]


def _work(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Return 2 x rows x inner dimension x columns; groups share the rows."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return int(2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1])

"""A trace on fake CPU tensors that follows what a CUDA device would do.

Traces run on fake *CPU* tensors: that works on any build of torch and needs no compiler. Where CUDA would choose otherwise than
the CPU, the choice is made CUDA's way: which operations autocast widens (`autocast`), which attention kernel runs and what it
keeps (`attention`, `flash`), which tensors an operation saves (`kernels`), what kernels take inside (`workspaces`), and the
optimizers' and clipping's batched (`foreach`) paths.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import attention, autocast, believing, bitsandbytes_optimizers, flash, hardware, kernels, liger, quantised, workspaces
from .swap import attribute, swapped

WORKSPACES = workspaces.ON_CUDA
"""For `Tracker(workspaces=...)`; sized for the GPU of the specification that `as_on_cuda` was entered with."""


@contextmanager
def as_on_cuda(spec: Any) -> Iterator[None]:
    """Enter it around the trainer's construction and its steps; with `"device": "cpu"` it changes nothing."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(plain_tensors())
        stack.enter_context(quantised.understood_by_peft())
        if spec.get("device", "cuda") == "cuda":
            stack.enter_context(hardware.of(spec))
            for follow in (autocast.follow_cuda, attention.follow_cuda, kernels.follow_cuda):
                stack.enter_context(follow())
            stack.enter_context(batched_updates())
            stack.enter_context(checks_pass())
            stack.enter_context(half_precision_trains())
            stack.enter_context(products_counted())
            stack.enter_context(kernels.triton_of_trl())
            stack.enter_context(believing.on_cuda("transformers", lambda name: name == "transformers.integrations.moe"))
            stack.enter_context(believing.attention_on_cuda())
            stack.enter_context(flash.installed())
            stack.enter_context(liger.installed(spec))
            if bitsandbytes_optimizers.is_theirs(str(spec.get("settings", {}).get("optim", ""))):
                stack.enter_context(bitsandbytes_optimizers.installed())
        yield


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Optimizers and clipping batch plain tensors only, and look at the exact type: a fake tensor counts as one."""
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
    """On CUDA an optimizer asked for nothing batches its updates (`foreach`), with temporaries as large as the parameters."""
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
    """What frameworks ask about the GPU before they accept a setting, answered for the GPU that is followed.

    `torch.cuda.is_available` stays as it is: the tensors are on the CPU, and nothing may try to reach a GPU.
    """
    answers = {
        "is_bf16_supported": lambda *args, **kwargs: hardware.capability() >= (8, 0),
        "get_device_capability": lambda *args, **kwargs: hardware.capability(),
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(attribute(torch.cuda, name, answer))
        yield


def workspaces_for(spec: Any) -> Any:
    """The table for this specification's device: some operations take memory inside on a CPU as well."""
    return WORKSPACES if spec.get("device", "cuda") == "cuda" else workspaces.ON_ANY_DEVICE


@contextmanager
def half_precision_trains() -> Iterator[None]:
    """accelerate turns float16 autocast off on a CPU; on CUDA it is on, with a gradient scaler beside it."""
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
    """Torch's gradient scaler in a step without overflow: it multiplies in place, keeps two numbers, and steps."""

    def scale(self, loss: Any) -> Any:
        return loss * torch.ones((), dtype=torch.float32, device=loss.device)

    def unscale_(self, optimizer: Any) -> None:
        """In place."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """Two numbers."""

    def get_scale(self) -> float:
        return 1.0

    def is_enabled(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}


@contextmanager
def products_counted() -> Iterator[None]:
    """Products that torch's counter leaves out: of 8-bit integers, and of groups of rows with a matrix each."""
    from torch.utils.flop_counter import flop_registry

    named = [("aten", "_int_mm"), ("aten", "_grouped_mm"), ("transformers", "grouped_mm_fallback")]
    packets = [getattr(getattr(torch.ops, space), name, None) for space, name in named]
    added = [packet for packet in packets if packet is not None and packet not in flop_registry]
    for packet in added:
        flop_registry[packet] = _work
    try:
        yield
    finally:
        for packet in added:
            del flop_registry[packet]


def _work(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Twice the rows, times what is added up, times the columns; groups share out the rows between them."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return int(2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1])

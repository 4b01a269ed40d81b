"""Fake tensors made directly: what a fake mode makes as well, without all that it looks at on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_noted: dict[Any, dict[str, Any]] = {}
"""By device, what a fake tensor's class notes of a new one beside its mode."""


def new(mode: Any, shape: Sequence[int], stride: Sequence[int], dtype: Any, device: Any) -> Any:
    """With memory of its own."""
    with torch._C._DisableTorchDispatch():
        return _fake(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def view(mode: Any, base: Any, shape: Sequence[int], stride: Sequence[int], offset: int, dtype: Any) -> Any:
    """In the memory of another."""
    with torch._C._DisableTorchDispatch():
        plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        plain.set_(base.untyped_storage(), offset, shape, stride)
        return _fake(mode, plain, base.fake_device)


def _fake(mode: Any, plain: Any, device: Any) -> Any:
    """As its class makes it: what that notes of a new one is the same for all, and noting takes it longest."""
    if device not in _noted:
        one = FakeTensor(mode, plain, device)
        _noted[device] = {name: value for name, value in vars(one).items() if name != "fake_mode"}
        return one
    one = torch.Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device)
    _guard(mode, one)
    vars(one).update(_noted[device], fake_mode=mode)
    return one


def _guard(mode: Any, one: Any) -> None:
    """Against being read, as the mode has it."""
    lenient = getattr(mode, "_allow_unsafe_data_ptr_access", False)
    name = "_set_warn_deprecated_on_mutable_data_ptr" if lenient else "_set_throw_on_mutable_data_ptr"
    getattr(torch._C, name, lambda _: None)(one)

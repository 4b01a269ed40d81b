"""Memory behind the tensors of a process on emulated cards: a card's, which the host can read, and
pinned memory of the host.

Pinned memory of the host stays untouched until something is written to it: offloaded optimizers and
vLLM's swap space are gigabytes per process, in tensors that are zero or were never written. torch
would write each of their pages; here such pages take no memory. Small tensors are left to torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch

MOST_FLOATS = int(os.environ.get("AUTOTUNE_EMULATOR_FLOATS", 1 << 14))
"""Elements, inputs and results together, up to which an operator with floating-point inputs is
computed.
"""

MOST_ALIASES = 20_000
MOST_PINNED_AND_WRITTEN = 1 << 20
"""Bytes up to which a pinned tensor is written as usual."""

aten = torch.ops.aten
_PINS = {
    getattr(aten, name).default for name in ("_pin_memory", "pin_memory") if hasattr(aten, name)
}
_ZEROS = {
    aten.zeros.default: aten.empty.memory_format,
    aten.zeros_like.default: aten.empty_like.default,
}
"""Operators whose result may be pinned and whole at once, with those that allocate alone."""

_aliases: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
"""CPU tensors over whole storages, by address, size and type."""


# 1. Memory of cards.


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the same memory."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    size = storage.nbytes()
    if not address or not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    key = (address, size, tensor.dtype)
    on_host = _aliases.get(key)
    if on_host is None:
        if len(_aliases) >= MOST_ALIASES:
            _aliases.clear()
        usable = size - size % tensor.dtype.itemsize
        buffer = (ctypes.c_char * usable).from_address(address)
        on_host = _aliases[key] = torch.frombuffer(buffer, dtype=tensor.dtype)
    return on_host.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def is_on_card(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def zero_on_card(tensor: torch.Tensor) -> None:
    if tensor.is_contiguous():  # whole pages are given back to the host instead of being written
        size = tensor.numel() * tensor.element_size()
        _library().cudaMemset(tensor.data_ptr(), 0, size)
    elif tensor.numel() <= MOST_FLOATS:
        alias(tensor).zero_()


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    """Return the emulator's library, which is preloaded."""
    library = ctypes.CDLL(None)
    library.cudaMemset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    library.emu_copy_written.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.emu_give_back.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def give_back(result: torch.Tensor) -> None:
    """Zero a result whose memory on the host is new, from torch's allocator, without writing to
    it.
    """
    storage = result.untyped_storage()
    _library().emu_give_back(storage.data_ptr(), storage.nbytes())


# 2. Pinned memory of the host.


def pins(function: Any, kwargs: Any) -> bool:
    """Return True for an operator whose result is pinned at once."""
    return function in _PINS or bool(function in _ZEROS and kwargs.get("pin_memory"))


def pinned(
    function: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """Return the result of an operator that `pins`, with the pages that hold something."""
    if function in _ZEROS:
        zeros = _ZEROS[function](*args, **kwargs)
        return _emptied(zeros) if zeros.nbytes > MOST_PINNED_AND_WRITTEN else zeros.zero_()
    source = args[0]
    is_plain = source.device.type == "cpu" and source.layout == torch.strided
    if not is_plain or not source.is_contiguous() or source.nbytes <= MOST_PINNED_AND_WRITTEN:
        return function(*args, **kwargs)
    pinned = _emptied(torch.empty(source.shape, dtype=source.dtype, pin_memory=True))
    _library().emu_copy_written(pinned.data_ptr(), source.data_ptr(), source.nbytes)
    return pinned


def _emptied(tensor: Any) -> Any:
    """Give the tensor's pages back to the host: they read as zeros. A cached block has bytes of
    its former tensor.
    """
    _library().cudaMemset(tensor.data_ptr(), 0, tensor.nbytes)
    return tensor

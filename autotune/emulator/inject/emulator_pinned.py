"""Pinned memory of the host that stays untouched until something is written to it.

Offloaded optimizers and vLLM's swap space are gigabytes per process, in tensors that are zero or were never written.
torch would write each of their pages; here such pages take no memory. Small tensors are left to torch.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

MOST_WRITTEN = 1 << 20  # bytes up to which a tensor is written as usual
aten = torch.ops.aten
ZEROS = {aten.zeros.default: aten.empty.memory_format, aten.zeros_like.default: aten.empty_like.default}
PINS = {getattr(aten, name).default for name in ("_pin_memory", "pin_memory") if hasattr(aten, name)}


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """Return the emulator's library, which is preloaded."""
    loaded = ctypes.CDLL(None)
    loaded.cudaMemset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    loaded.emu_copy_written.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    loaded.emu_give_back.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return loaded


def concerns(function: Any, kwargs: Any) -> bool:
    """Return True for an operator whose result is pinned and whole at once."""
    return function in PINS or (function in ZEROS and bool(kwargs.get("pin_memory")))


def pinned(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of such an operator, with the pages that hold something."""
    if function not in PINS:
        made = ZEROS[function](*args, **kwargs)
        return _emptied(made) if made.nbytes > MOST_WRITTEN else made.zero_()
    source = args[0]
    is_plain = source.device.type == "cpu" and source.layout == torch.strided and source.is_contiguous()
    if not is_plain or source.nbytes <= MOST_WRITTEN:
        return function(*args, **kwargs)
    made = _emptied(torch.empty(source.shape, dtype=source.dtype, pin_memory=True))
    library().emu_copy_written(made.data_ptr(), source.data_ptr(), source.nbytes)
    return made


def _emptied(tensor: Any) -> Any:
    """Give the tensor's pages back to the host: they read as zeros. A cached block has bytes of its former tensor."""
    library().cudaMemset(tensor.data_ptr(), 0, tensor.nbytes)
    return tensor

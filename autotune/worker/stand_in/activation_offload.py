"""Activations that wait on the host between forward and backward, except the latest few."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import torch

MIN_BYTES = 1024


def offloaded(in_flight: int | None) -> Any:
    """Return hooks that keep at most `in_flight` saved activations on the device; None: no hooks.

    Values are not kept: a trace needs sizes alone."""
    if in_flight is None:
        return contextlib.nullcontext()
    copied: deque[Any] = deque(maxlen=in_flight)

    def pack(tensor: Any) -> Any:
        if isinstance(tensor, torch.nn.Parameter) or tensor.nbytes < MIN_BYTES or not tensor.is_floating_point():
            return tensor
        copied.append(tensor)
        return tensor.shape, tensor.dtype, tensor.device

    def unpack(packed: Any) -> Any:
        if isinstance(packed, torch.Tensor):
            return packed
        copied.clear()
        shape, dtype, device = packed
        return torch.empty(shape, dtype=dtype, device=device)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

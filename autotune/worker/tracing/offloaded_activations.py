"""TRL's `activation_offloading` without streams and copies: which saved tensors stay on the GPU, and until when.

Source: `trl/models/activation_offloading.py` (OffloadActivations, get_act_offloading_ctx_manager). A tensor saved for the
backward pass goes to the host, and stays on the GPU until a few more were saved. What is saved again meanwhile is kept. Small
tensors, parameters and the input of the head never go.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

MIN_BYTES = 1024
STASH = 5
"""Tensors saved after one until it leaves the GPU."""


class _OnHost(NamedTuple):
    number: int
    shape: Any
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class OffloadedActivations(torch.autograd.graph.saved_tensors_hooks):  # type: ignore[misc]
    """Hooks around a training step. Values are not kept: a trace needs sizes alone."""

    def __init__(self) -> None:
        self._saved = 0
        self._stash: dict[int, torch.Tensor] = {}
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        self._saved += 1
        storage = _storage(tensor)
        if any(_storage(kept) == storage for kept in self._stash.values()):
            return tensor
        if tensor.nbytes < MIN_BYTES or isinstance(tensor._base if tensor._base is not None else tensor, torch.nn.Parameter):
            return tensor
        copied = tensor.contiguous() if 0 not in tensor.stride() else tensor
        for number in [number for number in self._stash if number <= self._saved - STASH]:
            del self._stash[number]
        self._stash[self._saved] = copied
        return _OnHost(self._saved, copied.shape, copied.stride(), copied.dtype, copied.device)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        kept = self._stash.pop(packed.number, None)
        if kept is not None:
            return kept
        return torch.empty_strided(packed.shape, packed.stride, dtype=packed.dtype, device=packed.device)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def for_model(model: Any, **_: Any) -> OffloadedActivations:
    """Return the hooks for a model, in place of TRL's function; its head is left out."""
    head = getattr(model, "lm_head", None)
    if head is not None:
        kept = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        head.register_forward_pre_hook(lambda *_: kept.__enter__())
        head.register_forward_hook(lambda *_: kept.__exit__(), always_call=True)
    return OffloadedActivations()

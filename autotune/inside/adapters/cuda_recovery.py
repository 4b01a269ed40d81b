"""Whether a GPU's memory came back after a candidate: an error can leave tensors behind that nothing frees any more.

Two figures tell. What torch has allocated must be what it was after loading. What lies outside torch (contexts, libraries' own
pools, an engine that should sleep) may grow once, when the first step loads its kernels, and not after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIB = 2**20

TORCH_TOLERANCE_BYTES = 256 * MIB
"""Workspaces of cuBLAS and cuDNN are allocated through torch at their first use, and stay: up to 33 MiB for a handle."""

OUTSIDE_TOLERANCE_BYTES = 512 * MIB
"""Kernels that are loaded at their first use stay, too."""


class MemoryKept(RuntimeError):
    """The process holds what it should have given back: the next candidate needs a new one."""


@dataclass(frozen=True)
class Standing:
    """What this process's device holds when nothing is being measured."""

    allocated_bytes: int
    reserved_bytes: int
    outside_bytes: int


def standing(cuda: Any) -> Standing:
    """After the cache was emptied. Figures of `torch.cuda` and of the driver (`mem_get_info`)."""
    free, total = cuda.mem_get_info()
    reserved = int(cuda.memory_reserved())
    return Standing(int(cuda.memory_allocated()), reserved, int(total) - int(free) - reserved)


def check(settled: Standing, now: Standing, *, first: bool) -> Standing:
    """What the next check is held against. Raises MemoryKept where too much stayed; the first candidate may load kernels."""
    kept = now.allocated_bytes - settled.allocated_bytes
    if kept > TORCH_TOLERANCE_BYTES:
        raise MemoryKept(f"torch still holds {kept} bytes more than after loading")
    cached = now.reserved_bytes - settled.reserved_bytes
    if cached > 2 * TORCH_TOLERANCE_BYTES:
        raise MemoryKept(f"torch's cache still holds {cached} bytes more than after loading: it is in pieces")
    outside = now.outside_bytes - settled.outside_bytes
    if outside > OUTSIDE_TOLERANCE_BYTES and not first:
        raise MemoryKept(f"outside of torch, {outside} bytes more are held than before")
    return Standing(settled.allocated_bytes, settled.reserved_bytes, max(now.outside_bytes, settled.outside_bytes))

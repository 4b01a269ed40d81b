"""Check of a GPU's memory after a candidate: an error can leave unreachable tensors behind.

Memory allocated by torch has to return to its value after loading. Memory outside torch (contexts, library pools, a
sleeping engine) may grow once, when the first step loads its kernels, and never again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MIB = 2**20

# Workspaces of cuBLAS and cuDNN come from torch at first use and stay: up to 33 MiB per handle.
TORCH_TOLERANCE_BYTES = 256 * MIB
OUTSIDE_TOLERANCE_BYTES = 512 * MIB  # kernels that are loaded at first use stay, too


class MemoryKept(RuntimeError):
    """Memory was not freed: the next candidate needs a new process."""


class IdleMemory(NamedTuple):
    """Memory of this process on its device between measurements."""

    allocated_bytes: int
    reserved_bytes: int
    outside_bytes: int


def idle_memory(cuda: Any) -> IdleMemory:
    """Read `torch.cuda` and the driver (`mem_get_info`), after the cache was emptied."""
    free, total = cuda.mem_get_info()
    reserved = int(cuda.memory_reserved())
    return IdleMemory(int(cuda.memory_allocated()), reserved, int(total) - int(free) - reserved)


def check(before: IdleMemory, now: IdleMemory, *, first: bool) -> IdleMemory:
    """Return the reference for the next check. Raise MemoryKept; `first` may load kernels."""
    allocated, reserved, outside = (new - old for old, new in zip(before, now))  # noqa: B905 (Python 3.9)
    if allocated > TORCH_TOLERANCE_BYTES:
        raise MemoryKept(f"torch still holds {allocated} bytes more than after loading")
    if reserved > 2 * TORCH_TOLERANCE_BYTES:
        raise MemoryKept(f"torch's cache still holds {reserved} bytes more than after loading: it is in pieces")
    if outside > OUTSIDE_TOLERANCE_BYTES and not first:
        raise MemoryKept(f"outside of torch, {outside} bytes more are held than before")
    return before._replace(outside_bytes=max(now.outside_bytes, before.outside_bytes))

"""Program that allocates memory of one GPU, so that only as much is free as a smaller card has.

One process per GPU, under any Python: it calls CUDA's driver itself and imports nothing else. It
reads the bytes to leave free from standard input and replies with the result. Its own context
counts, because it compares with the free memory of the whole device. It exits when its input is
closed, for whatever reason; the driver then frees everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

GRAIN_BYTES = 2 * 2**20  # page size of allocations by CUDA's driver
MAX_PIECE_BYTES = 2**30  # size of a single allocation, so that a part can be freed
# Shortfall of free memory that is accepted: page tables use the same memory.
SLACK_BYTES = 4 * GRAIN_BYTES
MAX_ROUNDS = 4096
_CUDA_ERROR_OUT_OF_MEMORY = 2


class CudaCard:
    """First visible CUDA device, through the driver's stable interface."""

    def __init__(self) -> None:
        self._cuda = cuda = ctypes.CDLL("libcuda.so.1")
        device = ctypes.c_int()
        context = ctypes.c_void_p()
        self._check("cuInit", cuda.cuInit(0))
        self._check("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), 0))
        code = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self._check("cuDevicePrimaryCtxRetain", code)
        self._check("cuCtxSetCurrent", cuda.cuCtxSetCurrent(context))

    def figures(self) -> tuple[int, int]:
        """Free and total bytes of the device, over all processes."""
        free = ctypes.c_size_t()
        total = ctypes.c_size_t()
        code = self._cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        self._check("cuMemGetInfo", code)
        return free.value, total.value

    def take(self, size: int) -> Any:
        """Return an allocation, or None if it does not fit."""
        pointer = ctypes.c_uint64()
        code = self._cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
        if code == _CUDA_ERROR_OUT_OF_MEMORY:
            return None
        self._check("cuMemAlloc", code)
        return pointer

    def give(self, piece: Any) -> None:
        code = self._cuda.cuMemFree_v2(piece)
        self._check("cuMemFree", code)

    def _check(self, call: str, code: int) -> None:
        if code:
            name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(name))
            raise OSError(f"{call}: {name.value.decode() if name.value else code}")


class HeldBallast:
    """Allocations that keep a card's memory from others."""

    def __init__(self, card: Any) -> None:
        self._card = card
        self._pieces: list[tuple[int, Any]] = []  # sizes and allocations

    def leave(self, free_bytes: int) -> dict[str, int]:
        """Allocate or free until so much is free, or slightly less, more if unavoidable."""
        for _ in range(MAX_ROUNDS):
            free, _total = self._card.figures()
            excess = free - free_bytes
            if -SLACK_BYTES < excess <= 0:
                break
            has_changed = self._take(excess) if excess > 0 else self._give()
            if not has_changed:
                break
        free, total = self._card.figures()
        return {
            "held_bytes": sum(size for size, _ in self._pieces),
            "free_bytes": free,
            "total_bytes": total,
        }

    def _take(self, excess: int) -> bool:
        grains = math.ceil(excess / GRAIN_BYTES)
        size = min(MAX_PIECE_BYTES, grains * GRAIN_BYTES)
        while size >= GRAIN_BYTES:
            piece = self._card.take(size)
            if piece is not None:
                self._pieces.append((size, piece))
                return True
            size = size // 2 // GRAIN_BYTES * GRAIN_BYTES
        return False

    def _give(self) -> bool:
        """Free the smallest allocation; the next round takes back what was too much."""
        if not self._pieces:
            return False
        smallest = min(self._pieces, key=lambda piece: piece[0])
        self._pieces.remove(smallest)
        _size, allocation = smallest
        self._card.give(allocation)
        return True


def serve(make_card: Callable[[], Any]) -> NoReturn:
    """Hold memory of the card as each line of the input requests, until the input is closed."""
    # The owner closes the input to end this process.
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            ballast = HeldBallast(make_card())
            for line in sys.stdin:
                free_bytes = int(json.loads(line)["leave_bytes"])
                left_bytes = ballast.leave(free_bytes)
                print(json.dumps(left_bytes), flush=True)
        except OSError as error:
            print(json.dumps({"error": str(error)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    serve(CudaCard)

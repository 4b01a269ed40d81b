"""Holds memory of one GPU, so that what is left is as much as a smaller card has.

Run as a program, one per GPU, by any Python: it speaks to CUDA's driver itself and imports nothing else. It is told on its
standard input how much is to be left, and answers how much there is. Its own context counts like all it holds, because it goes
by what the whole device has free. It ends, and the driver takes everything back, when its input is closed: that happens however
its owner ends.

`--host BYTES` stands in a machine without a GPU: a card of so many bytes of main memory, really taken.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import sys
from typing import Any

GRAIN_BYTES = 2 * 2**20
"""CUDA's driver gives memory in pages of this size."""

PIECE_BYTES = 2**30
"""The largest single piece, so that a part can be given back."""

SLACK_BYTES = 4 * GRAIN_BYTES
"""So much less than asked for may be left: page tables come out of the same memory."""

ROUNDS = 4096
_OUT_OF_MEMORY = 2


class CudaCard:
    """The first device that CUDA shows this process, through the driver's interface, whose calls stay as they are."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuInit", self._cuda.cuInit(0))
        self._check("cuDeviceGet", self._cuda.cuDeviceGet(ctypes.byref(device), 0))
        self._check("cuDevicePrimaryCtxRetain", self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self._check("cuCtxSetCurrent", self._cuda.cuCtxSetCurrent(context))

    def figures(self) -> tuple[int, int]:
        """Free and total bytes of the device, whoever holds the rest."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check("cuMemGetInfo", self._cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        return free.value, total.value

    def take(self, size: int) -> Any:
        """A piece, or None where there is not so much."""
        pointer = ctypes.c_uint64()
        code = self._cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
        if code == _OUT_OF_MEMORY:
            return None
        self._check("cuMemAlloc", code)
        return pointer

    def give(self, piece: Any) -> None:
        self._check("cuMemFree", self._cuda.cuMemFree_v2(piece))

    def _check(self, call: str, code: int) -> None:
        if code:
            name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(name))
            raise OSError(f"{call}: {name.value.decode() if name.value else code}")


class HostCard:
    """Main memory in a card's place."""

    def __init__(self, total: int) -> None:
        self._total, self._taken = total, 0

    def figures(self) -> tuple[int, int]:
        return self._total - self._taken, self._total

    def take(self, size: int) -> Any:
        if size > self._total - self._taken:
            return None
        piece = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, size, mmap.PAGESIZE):
            piece[page] = 1
        self._taken += size
        return piece

    def give(self, piece: Any) -> None:
        self._taken -= len(piece)
        piece.close()


class Ballast:
    """The pieces that are held."""

    def __init__(self, card: Any) -> None:
        self._card = card
        self._pieces: list[tuple[int, Any]] = []

    def leave(self, wanted: int) -> dict[str, int]:
        """Take or give back until so many bytes are free, or a little less; never more where it can be helped."""
        for _ in range(ROUNDS):
            excess = self._card.figures()[0] - wanted
            if -SLACK_BYTES < excess <= 0 or not (self._take(excess) if excess > 0 else self._give()):
                break
        free, total = self._card.figures()
        return {"held_bytes": sum(size for size, _ in self._pieces), "free_bytes": free, "total_bytes": total}

    def _take(self, excess: int) -> bool:
        size = min(PIECE_BYTES, -(-excess // GRAIN_BYTES) * GRAIN_BYTES)
        while size >= GRAIN_BYTES:
            piece = self._card.take(size)
            if piece is not None:
                self._pieces.append((size, piece))
                return True
            size = size // 2 // GRAIN_BYTES * GRAIN_BYTES
        return False

    def _give(self) -> bool:
        """The smallest piece goes back; what was too much of it is taken again in the next round."""
        if not self._pieces:
            return False
        smallest = min(self._pieces, key=lambda held: held[0])
        self._pieces.remove(smallest)
        self._card.give(smallest[1])
        return True


def main() -> None:
    options = argparse.ArgumentParser(prog="autotune ballast")
    options.add_argument("--host", type=int, metavar="BYTES")
    host = options.parse_args().host
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):  # the owner decides when it is over
        try:
            ballast = Ballast(HostCard(host) if host else CudaCard())
            for line in sys.stdin:
                print(json.dumps(ballast.leave(int(json.loads(line)["leave_bytes"]))), flush=True)
        except OSError as error:
            print(json.dumps({"error": str(error)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

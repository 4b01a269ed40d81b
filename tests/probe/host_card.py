"""Ballast's program with main memory in place of a GPU: `python -I -S host_card.py BYTES`, a
card of that size.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autotune.worker.ballast_process import serve


class HostCard:
    """Main memory in place of a GPU."""

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


if __name__ == "__main__":
    serve(lambda: HostCard(int(sys.argv[1])))

"""The parent's handle on a ballast: a process that holds what a smaller card would not have."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import autotune.inside
from autotune.devices import VISIBLE
from autotune.errors import RigError

ANSWER_SECONDS = 60.0
"""Starting CUDA takes seconds on a machine with many GPUs, and taking the memory next to none."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a ballast holds and leaves."""

    held_bytes: int
    """Without its own context."""

    free_bytes: int
    total_bytes: int
    """Of the device, as CUDA shows it."""


class Ballast:
    """One process on one GPU. It ends with its owner, however that ends."""

    def __init__(self, python: Path, device: str, *, arguments: Sequence[str] = ()) -> None:
        """`device` is what CUDA_VISIBLE_DEVICES says for it alone."""
        self._device = device
        self._process = subprocess.Popen(
            # -I -S: nothing but the standard library, whatever that environment loads at its start.
            [str(python), "-I", "-S", str(Path(autotune.inside.__file__).parent / "ballast.py"), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            env=_environment(os.environ, device),
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def leave(self, wanted_bytes: int) -> Held:
        """Hold all but so many bytes of the device; RigError where that cannot be had."""
        answer = self._ask({"leave_bytes": wanted_bytes})
        if "error" in answer:
            raise RigError(f"GPU {self._device} can't be made smaller: {answer['error']}")
        return Held(**answer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _ask(self, words: Mapping[str, int]) -> dict[str, int]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()
            return dict(json.loads(self._line()))
        except (OSError, ValueError):
            raise RigError(f"The ballast on GPU {self._device} ended, or did not answer.") from None

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line, deadline = b"", time.monotonic() + ANSWER_SECONDS
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._process.stdout.fileno(), 4096) if ready else b""
            if not piece:
                return b""
            line += piece
        return line


def _environment(ours: Mapping[str, str], device: str) -> dict[str, str]:
    return {**ours, VISIBLE: device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

"""Handle on a ballast: a process that occupies the memory beyond a smaller GPU's size."""

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
from types import MappingProxyType

import autotune.worker
from autotune.core.errors import ProbeError
from autotune.machine.devices import DEVICE_ORDER, VISIBLE

REPLY_SECONDS = 60.0  # CUDA starts within seconds on a machine with many GPUs; the allocation itself is fast


@dataclass(frozen=True, kw_only=True)
class BallastHold:
    """Memory that a ballast holds and leaves."""

    held_bytes: int  # Bytes without its own CUDA context
    free_bytes: int
    total_bytes: int  # Total of the device as CUDA reports it


class Ballast:
    """Process on one GPU. It exits with its owner, however that exits."""

    def __init__(
        self, python: Path, device: str, *, arguments: Sequence[str] = (), variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`device`: value of CUDA_VISIBLE_DEVICES for this GPU alone; `variables`: added to its environment."""
        self._device = device
        self._process = subprocess.Popen(
            # -I -S: standard library only; no site packages, no .pth files.
            [str(python), "-I", "-S", str(Path(autotune.worker.__file__).parent / "ballast_process.py"), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **variables, VISIBLE: device, **DEVICE_ORDER},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def leave(self, free_bytes: int) -> BallastHold:
        """Hold the device except for `free_bytes`; ProbeError where that fails."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"leave_bytes": free_bytes}).encode() + b"\n")
            self._process.stdin.flush()
            reply: dict[str, int] = dict(json.loads(self._line()))
        except (OSError, ValueError):
            raise ProbeError(f"The ballast on GPU {self._device} ended, or did not answer.") from None
        if "error" in reply:
            raise ProbeError(f"GPU {self._device} can't be made smaller: {reply['error']}")
        return BallastHold(**reply)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line, deadline = b"", time.monotonic() + REPLY_SECONDS
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._process.stdout.fileno(), 4096) if ready else b""
            if not piece:
                return b""
            line += piece
        return line

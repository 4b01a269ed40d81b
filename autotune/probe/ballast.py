"""Ballast that emulates a smaller GPU, and the wait until a GPU's memory is released."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import autotune.worker
from autotune.core.errors import ProbeError
from autotune.core.units import GIB, MIB
from autotune.machine.nvml import DEVICE_ORDER, VISIBLE

# More than any GPU has: a ballast that must leave this holds nothing, and reports the GPU's size.
UNLIMITED_BYTES = 2**62

# Smallest amount that a ballast can hold exactly: its CUDA context takes some hundred MiB.
MIN_BALLAST_BYTES = GIB

RESIDUE_BYTES = 32 * MIB  # Memory that a driver may retain after a process: not counted as growth

RELEASE_SECONDS = 30.0  # Time that a driver may take to release the memory of a killed process

GPU_POLL_S = 0.1

PROGRAM = str(Path(autotune.worker.__file__).parent / "ballast_process.py")

# CUDA starts within seconds on a machine with many GPUs; the allocation itself is fast.
REPLY_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class BallastHold:
    held_bytes: int  # Bytes without its own CUDA context
    free_bytes: int
    total_bytes: int  # Total of the device as CUDA reports it


class Ballast:
    """Process on one GPU. It exits with its owner, however that exits."""

    def __init__(
        self,
        python: Path,
        device: str,
        *,
        program: Sequence[str] = (PROGRAM,),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`device`: value of CUDA_VISIBLE_DEVICES for this GPU alone; `variables`: added to its
        environment.
        """
        self._device = device
        self._process = subprocess.Popen(
            # -I -S: standard library only; no site packages, no .pth files.
            [str(python), "-I", "-S", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(variables or {}), VISIBLE: device, **DEVICE_ORDER},
        )

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
            raise ProbeError(
                f"The ballast on GPU {self._device} ended, or did not answer."
            ) from None
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
        pipe = self._process.stdout
        deadline = time.monotonic() + REPLY_SECONDS
        line = b""
        while not line.endswith(b"\n"):
            seconds = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([pipe], [], [], seconds)
            piece = os.read(pipe.fileno(), 4096) if ready else b""
            if not piece:
                return b""
            line += piece
        return line


MakeBallast = Callable[[Path, str], Ballast]


def needs_ballast(limit_bytes: int, total_bytes: int) -> bool:
    """Return True if a ballast should hold the rest of the GPU; else torch's cap is the limit."""
    return total_bytes - limit_bytes >= MIN_BALLAST_BYTES


def wait_until_released(
    used_bytes: Callable[[], int],
    base_bytes: int,
    *,
    patience_seconds: float = RELEASE_SECONDS,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait until a GPU is as empty as before; return the excess, 0 once two readings agree. An
    engine that starts while a killed process's memory is released mistakes it for its own.
    """
    deadline = now() + patience_seconds
    last = None
    while True:
        used = used_bytes()
        released = used <= base_bytes + RESIDUE_BYTES
        if released and last is not None and abs(used - last) <= RESIDUE_BYTES:
            return 0
        if now() >= deadline:
            return 0 if released else used - base_bytes
        last = used
        sleep(GPU_POLL_S)

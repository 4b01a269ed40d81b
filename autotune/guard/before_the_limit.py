"""Before memory runs out: the trend of the peak. Hangs: the time without a step, and the stacks."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from autotune.core.measurement import CycleMemory
from autotune.core.memory_growth import SOAK_WARMUP_CYCLES, step_of_limit
from autotune.core.units import format_bytes
from autotune.guard.step_progress import StepProgress
from autotune.guard.watched import Look
from autotune.worker.processes import descendants

MAX_TREND_POINTS = 64
HANG_FACTOR = 10  # usual times of a step without one
MIN_HANG_SECONDS = 60.0
STACK_SECONDS = 20.0
MAX_STACKS = 8


@dataclass
class PeakTrend:
    """Peaks over steps. As with `MemoryWatch`, half of the points are dropped above a number."""

    points: list[CycleMemory] = field(default_factory=list)
    _every: int = 1

    def add(self, step: int, look: Look) -> None:
        if step <= SOAK_WARMUP_CYCLES or step % self._every:
            return
        if self.points and self.points[-1].steps >= step:
            return
        self.points.append(
            CycleMemory(
                steps=step,
                seconds=0.0,
                peak_bytes=look.peak_bytes,
                held_bytes=look.used_bytes,
            )
        )
        if len(self.points) > MAX_TREND_POINTS:
            self.points = self.points[::2]
            self._every *= 2

    def crossing(self, progress: StepProgress, look: Look) -> int | None:
        """Return the step after which memory runs out before the end; None: it does not."""
        if progress.step is None or progress.total is None:
            return None
        until = step_of_limit(self.points, progress.step, look.margin_bytes)
        if until is None or until >= progress.total:
            return None
        return until


def crossing_text(
    until: int,
    total: int | None,
    look: Look,
) -> str:
    return (
        f"the peak grows and reaches the limit of {format_bytes(look.limit_bytes)} on {look.place}"
        f" after step {until} at the latest; the run takes {total}"
    )


def handles(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def hang_seconds(progress: StepProgress, now: float) -> float | None:
    """Return for how long there was no step, if that is ten times the usual time; else None."""
    usual = progress.usual_seconds
    if usual is None:
        return None
    waited = now - progress.since
    if waited < max(MIN_HANG_SECONDS, HANG_FACTOR * usual):
        return None
    return waited


def stacks(pid: int) -> str:
    """Return the stacks of the run's Python processes by py-spy; empty where it is not there."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    texts = []
    for number in [pid, *descendants(pid)][:MAX_STACKS]:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            dump = subprocess.run(
                [program, "dump", "--pid", str(number)],
                capture_output=True,
                text=True,
                timeout=STACK_SECONDS,
            )
            texts.append(dump.stdout)
    return "\n".join(texts)

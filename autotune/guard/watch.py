"""Watch over a running attempt: steps, checkpoints, memory, hangs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autotune.core.files import FOR_ITS_OWNER, write_atomically
from autotune.core.units import format_seconds
from autotune.guard.attempt import Attempt, ProcessEnd
from autotune.guard.before_the_limit import (
    PeakTrend,
    crossing_text,
    handles,
    hang_seconds,
    stacks,
)
from autotune.guard.checkpoints import Checkpoint, CheckpointFolder, FoundCheckpoints
from autotune.guard.ending import Reason
from autotune.guard.history import (
    AttemptRecord,
)
from autotune.guard.save_request import SaveRequest
from autotune.guard.step_progress import PrintedLengths, StepProgress
from autotune.guard.watched import Look, MemoryWatcher

GUARD_POLL_SECONDS = 0.5
CHECKPOINT_SECONDS = 5.0  # between two looks for new checkpoints
STOP_SECONDS = 60.0  # that a command may take to end when the guard asks for it
WRITTEN_SECONDS = 2.0  # a file that changed less long ago is still being written

Print = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class GuardOptions:
    out: Path
    restarts: int = 3
    early: bool = False
    end_hangs: bool = False
    may_change: frozenset[str] = frozenset()


@dataclass
class AttemptWatch:
    """The watch over one running attempt."""

    attempt: Attempt
    watcher: MemoryWatcher
    record: AttemptRecord
    folder: CheckpointFolder | NoCheckpoints
    save: SaveRequest
    options: GuardOptions
    note: Print
    requested: Reason | None = None  # why the guard itself ended the attempt
    _trend: PeakTrend = field(default_factory=PeakTrend)
    _lengths: PrintedLengths = field(default_factory=PrintedLengths)
    _warned: bool = False
    _hang_noted: float = 0.0
    _end_by: float | None = None
    _next_checkpoints: float = 0.0
    _saved_at_request: int = -1

    def to_the_end(self) -> ProcessEnd:
        progress = StepProgress(time.monotonic())
        while True:
            end = self.attempt.wait(GUARD_POLL_SECONDS)
            if end is not None:
                self._next_checkpoints = 0.0  # the last look
            self._read(progress)
            if end is not None:
                if self.save.was_obeyed:
                    self.requested = Reason.EARLY
                return end
            look = self.watcher.look(self.attempt.pid)
            if look is not None:
                self._look(look, progress)
            self._check_hang(progress)
            self._end_if_due()

    def _read(self, progress: StepProgress) -> None:
        """Read the new output and the new checkpoints."""
        now = time.monotonic()
        printed = self.attempt.tail.fresh()
        progress.feed(printed, now)
        self._lengths.feed(printed)
        if now >= self._next_checkpoints:
            self._next_checkpoints = now + CHECKPOINT_SECONDS
            for checkpoint in self.folder.listed():
                if checkpoint.written >= self.record.began and self.record.saved(checkpoint):
                    progress.reached(checkpoint.step, now)
                    self._after_checkpoint(checkpoint)
        self.record.last_step = self._last_step(progress)
        self.record.total_steps = progress.total
        self.record.step_seconds = progress.usual_seconds
        self.record.lengths = self._lengths.steps

    def _last_step(self, progress: StepProgress) -> int | None:
        """Return the last step. A bar begins at 0 before it jumps to the checkpoint's step."""
        if progress.step is None:
            return None
        return max(progress.step, self.record.from_step or 0)

    def _look(self, look: Look, progress: StepProgress) -> None:
        """Watch the trend of the peak; warn, or ask the trainer to save."""
        if progress.step is None:
            return
        self._trend.add(progress.step, look)
        if self._warned:
            return
        until = self._trend.crossing(progress, look)
        if until is None:
            return
        self._warned = True
        text = crossing_text(until, progress.total, look)
        if not self.options.early:
            self.note(f"{text}. --early would save and restart before that.")
            return
        due = self.save.make(progress.step, progress.usual_seconds)
        self.note(f"{text}. The trainer is asked to save after step {due}.")
        # Without a handler the signal would end the command.
        if self.attempt.pid is not None and handles(self.attempt.pid, signal.SIGUSR1):
            self.attempt.send(signal.SIGUSR1)
        steps = [checkpoint["step"] for checkpoint in self.record.checkpoints]
        self._saved_at_request = max(steps, default=-1)

    def _after_checkpoint(self, checkpoint: Checkpoint) -> None:
        """End an attempt that is to save once its next checkpoint is whole."""
        is_asked = self.save.is_made and self.requested is None
        if not is_asked or checkpoint.step <= self._saved_at_request:
            return
        if self.folder.find().newest != checkpoint or not _is_at_rest(checkpoint):
            del self.record.checkpoints[-1]  # still being written: look again
            return
        self._end(Reason.EARLY)

    def _check_hang(self, progress: StepProgress) -> None:
        now = time.monotonic()
        waited = hang_seconds(progress, now)
        if waited is None or self.requested is not None or not self.watcher.are_gpus_idle():
            return
        if self._hang_noted != progress.since:
            self._hang_noted = progress.since
            self.note(
                f"no step for {format_seconds(waited)}, and no GPU computes; usual are"
                f" {format_seconds(progress.usual_seconds or 0.0)}. {self._keep_stacks()}"
            )
        if self.options.end_hangs:
            self._end(Reason.HANG)

    def _keep_stacks(self) -> str:
        text = "" if self.attempt.pid is None else stacks(self.attempt.pid)
        if not text:
            return "py-spy is not there to show the stacks."
        path = self.options.out / f"stacks-{self.record.number}.txt"
        try:
            write_atomically(path, text.encode(), mode=FOR_ITS_OWNER)
        except OSError:
            return "Its stacks could not be written."
        return f"Stacks: {path}."

    def _end(self, reason: Reason) -> None:
        """End the attempt: politely first."""
        self.requested = reason
        self.attempt.send(signal.SIGTERM)
        self._end_by = time.monotonic() + STOP_SECONDS

    def _end_if_due(self) -> None:
        if self._end_by is not None and time.monotonic() > self._end_by:
            self.attempt.end()


class NoCheckpoints:
    """Checkpoints of a framework that stores none that can be resumed."""

    def find(self) -> FoundCheckpoints:
        return FoundCheckpoints(newest=None)

    def listed(self) -> list[Checkpoint]:
        return []

    def point_to(self, checkpoint: Checkpoint) -> None:
        """Do nothing."""


def _is_at_rest(checkpoint: Checkpoint) -> bool:
    return time.time() - checkpoint.written > WRITTEN_SECONDS

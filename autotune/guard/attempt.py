"""Start of the command: its processes, its streams, and the signals that reach it.

guard -> keeper (`worker/keeper.py`) -> command. Whichever of the three ends first, the others end
what is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import autotune.worker
from autotune.guard.streams import OutputTail, Streams
from autotune.worker import processes
from autotune.worker.abandoned_builds import release_abandoned_builds

OUTPUT_SECONDS = 2.0  # that the last output may take to arrive
FORCED_END_SECONDS = 10.0  # between the second stop signal and the forced end
SAME_STOP_SECONDS = 1.0  # `timeout` and schedulers may send one stop twice

# Sent to the command alone: what else should receive them is its business.
TO_THE_LEADER = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Sent by a terminal to every process of the command.
TO_THE_GROUP = (signal.SIGINT, signal.SIGQUIT)
SUSPENDING = (signal.SIGSTOP, signal.SIGCONT)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

KILLED = signal.SIGKILL


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """End of the command: by a signal, or with an exit code."""

    signal: int | None = None
    exit: int | None = None

    @property
    def shell_code(self) -> int:
        """Exit code as a shell reports it: 128 and the signal's number, for a signal."""
        if self.signal is not None:
            return 128 + self.signal
        return self.exit or 0


class Attempt:
    """The running command."""

    def __init__(self, command_words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.tail = OutputTail()
        self.pid: int | None = None  # of the command; None: it could not be started
        self._streams = Streams(self.tail)
        self._pending = b""
        self._first_stop: float | None = None
        self._forced_at: float | None = None
        processes.adopt_orphans()  # of a keeper that is killed
        release_abandoned_builds(environment)  # of the attempt before this one
        self._channel, keepers_end = socket.socketpair()
        self._keeper = subprocess.Popen(
            _keeper_command(keepers_end.fileno(), command_words),
            stdin=self._streams.child_stdin,
            stdout=self._streams.child_stdout,
            stderr=self._streams.child_stderr,
            pass_fds=(keepers_end.fileno(),),
            process_group=0,
            env=dict(environment),
        )
        keepers_end.close()
        self._streams.started()

    @property
    def stop_requested(self) -> bool:
        """True once a stop signal was passed on: the command is not started again."""
        return self._first_stop is not None

    def wait(self, seconds: float) -> ProcessEnd | None:
        """Return how the command ended; None if it still runs after these seconds."""
        deadline = time.monotonic() + seconds
        while True:
            self._force_if_due()
            remaining = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._channel], [], [], remaining)
            if not readable:
                return None
            end = self._read()
            if end is not None:
                self._close()
                return end

    def send(self, number: int) -> None:
        """Pass a signal on to the command."""
        is_for_all = number in TO_THE_GROUP or number in SUSPENDING
        target = "group" if is_for_all else "leader"
        self._tell(f"signal {int(number)} {target}")

    def stop(self, number: int) -> None:
        """Pass a stop signal on. A second one sets a deadline for the command."""
        now = time.monotonic()
        if self._first_stop is None:
            self._first_stop = now
        elif now > self._first_stop + SAME_STOP_SECONDS and self._forced_at is None:
            self._forced_at = now + FORCED_END_SECONDS
        self.send(number)

    def end(self) -> None:
        """Kill the command with everything below it."""
        self._tell("end")

    def resize(self) -> None:
        self._streams.resize()

    def _read(self) -> ProcessEnd | None:
        try:
            received = self._channel.recv(4096)
        except ConnectionError:
            received = b""
        if not received:  # the keeper was killed, and the kernel has killed the command
            processes.end_descendants()
            return ProcessEnd(signal=KILLED)
        *lines, self._pending = (self._pending + received).split(b"\n")
        for line in lines:
            word, number = line.decode().split()
            if word == "started":
                self.pid = int(number)
            elif word == "signal":
                return ProcessEnd(signal=int(number))
            else:
                return ProcessEnd(exit=int(number))
        return None

    def _close(self) -> None:
        self._keeper.wait()
        self._streams.finish(OUTPUT_SECONDS)
        self._channel.close()

    def _force_if_due(self) -> None:
        if self._forced_at is not None and time.monotonic() > self._forced_at:
            self.end()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._channel.sendall(f"{line}\n".encode())


def _keeper_command(descriptor: int, command_words: Sequence[str]) -> list[str]:
    program = Path(autotune.worker.__file__).parent
    return [sys.executable, "-S", "-E", str(program), "keep", str(descriptor), *command_words]


@contextlib.contextmanager
def signals_forwarded(attempt: Attempt) -> Iterator[None]:
    """Pass signals on to the command inside the block. Ignored ones stay ignored."""

    def forward(number: int, frame: FrameType | None) -> None:
        if number in STOPPING:
            attempt.stop(number)
        else:
            attempt.send(number)

    def suspend(number: int, frame: FrameType | None) -> None:
        attempt.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        attempt.send(signal.SIGCONT)

    def resize(number: int, frame: FrameType | None) -> None:
        attempt.resize()

    handlers = dict.fromkeys((*TO_THE_LEADER, *TO_THE_GROUP), forward)
    handlers |= {signal.SIGTSTP: suspend, signal.SIGWINCH: resize}
    before = {}
    for number, handler in handlers.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)

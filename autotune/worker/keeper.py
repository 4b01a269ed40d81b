"""Keeper: the process between a guard and its command. It outlives either, and leaves no orphan.

    python .../autotune/worker keep FD WORD...

FD is one end of a socket pair. The guard writes lines: `signal NUMBER leader`,
`signal NUMBER group`, `end`. The keeper writes `started PID`, and at the end `exit CODE` or
`signal NUMBER`. Its three ways to the end:

- The command ends: what it started and left running ends with it, after a grace period.
- The guard ends, by SIGKILL too: the socket closes, and everything below is killed.
- The keeper is killed: the kernel kills the command, and the guard, which adopts the rest, kills
  that.
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
from collections.abc import Mapping

from . import processes

LEAVE_SECONDS = 5.0  # in which processes that the command left may end by themselves
KEEPER_POLL_SECONDS = 0.05
REAP_SECONDS = 1.0  # between two looks at adopted processes that have ended
CANNOT_START = 127  # exit code of shells for a program that is not there

# A scheduler sends these to every process of a job. The guard decides what the command receives.
IGNORED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGTSTP")
)


def main() -> None:
    """Keep one command, as described above."""
    channel = socket.socket(fileno=int(sys.argv[2]))
    command_words = sys.argv[3:]
    processes.adopt_orphans()
    inherited = {number: signal.getsignal(number) for number in IGNORED}
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        command = _start(command_words, inherited)
    except OSError as error:
        sys.stderr.write(f"autotune: {command_words[0]} can't be started: {error.strerror}\n")
        _tell(channel, f"exit {CANNOT_START}")
        return
    _tell(channel, f"started {command.pid}")
    _let_go_of_the_streams()
    if _is_guarded_to_the_end(channel, command):
        _end_what_is_left(channel)
        _tell(channel, _ending(command.returncode))
    else:
        processes.end_descendants()


def _start(command_words: list[str], handlers: Mapping[int, object]) -> subprocess.Popen[bytes]:
    """Start the command in a process group of its own, which ends with this process."""
    keeper = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)
        for number, handler in handlers.items():
            is_ignored = handler == signal.SIG_IGN  # SIGHUP under nohup stays ignored
            signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        processes.exit_with_parent(keeper)

    return subprocess.Popen(command_words, preexec_fn=prepare)


def _let_go_of_the_streams() -> None:
    """Leave the streams to the command: their reader sees the end when it closes them."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


def _is_guarded_to_the_end(channel: socket.socket, command: subprocess.Popen[bytes]) -> bool:
    """Wait for the command's end; return False if the guard ended first."""
    pending = b""
    watched: list[socket.socket | int] = [channel]
    seconds = KEEPER_POLL_SECONDS
    with contextlib.suppress(OSError):  # kernels before 5.3: look often
        watched.append(os.pidfd_open(command.pid))
        seconds = REAP_SECONDS
    while command.poll() is None:
        _reap_orphans(command)
        readable, _, _ = select.select(watched, [], [], seconds)
        if channel not in readable:
            continue
        received = _received(channel)
        if not received:
            return False
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            _obey(line.decode().split(), command)
    return True


def _reap_orphans(command: subprocess.Popen[bytes]) -> None:
    """Reap adopted processes that have ended, never the command itself."""
    with contextlib.suppress(OSError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == command.pid:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def _received(channel: socket.socket) -> bytes:
    try:
        return channel.recv(4096)
    except ConnectionError:
        return b""


def _obey(command_words: list[str], command: subprocess.Popen[bytes]) -> None:
    if command_words == ["end"]:
        # Not reaped here: the command's exit status would be lost.
        for pid in processes.descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return
    _, number, target = command_words
    with contextlib.suppress(OSError):
        if target == "group":
            os.killpg(command.pid, int(number))
        else:
            os.kill(command.pid, int(number))


def _end_what_is_left(channel: socket.socket) -> None:
    """Give the remaining processes time to end by themselves, then kill them."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while processes.descendants(os.getpid()) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        readable, _, _ = select.select([channel], [], [], KEEPER_POLL_SECONDS)
        if readable:  # the guard has ended, or wants the end
            break
    processes.end_descendants()


def _tell(channel: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # the guard has ended
        channel.sendall(f"{line}\n".encode())


def _ending(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit {returncode}"

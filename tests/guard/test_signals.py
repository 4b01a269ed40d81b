"""Streams and signals: the command has what it would have without the guard."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUARD = (sys.executable, "-m", "autotune", "guard")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _guarded(folder: Path, program: str, *options: str) -> list[str]:
    options_of_guard = ("--out", str(folder / "guard"), "--values", "micro=8,4")
    return [*GUARD, *options_of_guard, *options, "--", sys.executable, "-c", program, "{micro}"]


@pytest.mark.parametrize("code", [0, 1, 7, 130])
def test_the_exit_code_is_the_commands(tmp_path: Path, code: int) -> None:
    command = _guarded(tmp_path, f"raise SystemExit({code})")
    done = subprocess.run(
        command,
        env=_environment(),
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == code


def test_both_streams_arrive_apart_and_input_is_inherited(tmp_path: Path) -> None:
    program = (
        "import sys; print(input()); print('err', file=sys.stderr); print(sys.stdout.isatty())"
    )
    done = subprocess.run(
        _guarded(tmp_path, program),
        env=_environment(),
        input="typed\n",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "typed\nFalse\n"
    assert done.stderr.startswith("autotune guard: ") or done.stderr.startswith("err\n")
    assert "err\n" in done.stderr


def test_a_terminal_stays_a_terminal(tmp_path: Path) -> None:
    program = (
        "import os, sys; print([os.isatty(stream) for stream in (0, 1, 2)], input(), "
        "os.get_terminal_size().columns)"
    )
    our_end, its_end = pty.openpty()
    fcntl.ioctl(our_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 77, 0, 0))
    with subprocess.Popen(
        _guarded(tmp_path, program),
        env=_environment(),
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
    ) as process:
        os.close(its_end)
        os.write(our_end, b"typed\n")
        shown = b""
        while True:
            try:
                shown += os.read(our_end, 4096)
            except OSError:  # the last writer has closed
                break
    os.close(our_end)
    assert process.returncode == 0, shown.decode()
    assert b"[True, True, True] typed 77\r\n" in shown


def _after_signal(
    tmp_path: Path,
    program: str,
    number: int,
    seconds: float = 60,
) -> tuple[str, int]:
    """Signal the guard once the program is ready. Return what was printed, and the exit code."""
    with subprocess.Popen(
        _guarded(tmp_path, program),
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_answer_interrupts,
    ) as process:
        _wait_for(tmp_path / "ready")
        process.send_signal(number)
        stdout, _ = process.communicate(timeout=seconds)
    return stdout, process.returncode


def _answer_interrupts() -> None:
    """Take the signal as in a terminal: what a shell starts in the background ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_reaches_the_command(tmp_path: Path, number: int) -> None:
    program = (
        "import pathlib, signal, sys, time\n"
        "def handle(number, frame):\n"
        "    print('received', number, flush=True); sys.exit(5)\n"
        f"signal.signal({int(number)}, handle)\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(60)"
    )
    stdout, code = _after_signal(tmp_path, program, number)
    assert stdout == f"received {int(number)}\n"
    assert code == 5


def test_an_interrupt_reaches_every_process_of_the_command(tmp_path: Path) -> None:
    program = (
        "import pathlib, subprocess, sys\n"
        "sleep = subprocess.Popen(['sleep', '60'])\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "try: sleep.wait()\n"
        "except KeyboardInterrupt: sleep.wait(); print('both have ended', flush=True)"
    )
    stdout, _ = _after_signal(tmp_path, program, signal.SIGINT, seconds=50)
    assert stdout == "both have ended\n", "`sleep` alone would take a minute"


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)

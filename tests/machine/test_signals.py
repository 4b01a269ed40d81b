"""Stop signals to a real process: it ends, whatever becomes of the exception."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

LOST = """
import os, sys, time
from autotune.cli.exit_codes import interruptible
from autotune.machine import signals
signals.END_SECONDS = 2.0
with interruptible():
    words = "ready"
    while True:
        try:
            print(words, flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            words = "lost"
"""

UNWOUND = """
import time
from autotune.cli.exit_codes import interruptible
try:
    with interruptible():
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            time.sleep(0.3)
            print("closed", flush=True)
except KeyboardInterrupt:
    raise SystemExit(7)
"""


POSTPONED = """
import time
from autotune.cli.exit_codes import interruptible
from autotune.machine.signals import stop_requested, uninterrupted
with interruptible():
    try:
        with uninterrupted():
            with uninterrupted():
                print("ready", flush=True)
                while not stop_requested():
                    time.sleep(0.01)
            print("complete", flush=True)
        print("missed", flush=True)
    except KeyboardInterrupt:
        raise SystemExit(7)
"""


MISSED = """
import signal, threading, time
from autotune.cli.exit_codes import interruptible
def send():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
try:
    with interruptible():
        threading.Thread(target=send).start()
        print("ready", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    raise SystemExit(7)
"""
"""The signal arrives in another thread, so the main thread's sleep goes on."""


def _unignored() -> None:
    """Undo what a shell does for its background jobs, which may be what runs the tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _stopped(program: str, *numbers: signal.Signals) -> tuple[int, str, str]:
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_unignored,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for number in numbers:
            process.send_signal(number)
        out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGINT)], ids=["once", "two at once"]
)
def test_a_process_whose_interruption_is_lost_is_ended_all_the_same(
    numbers: tuple[signal.Signals, ...],
) -> None:
    code, out, err = _stopped(LOST, *numbers)
    assert code == 130 and "lost" in out and "Traceback" not in err
    assert "Interrupted. What did not close in time was abandoned" in err


def test_a_second_signal_does_not_disturb_the_closing() -> None:
    assert _stopped(UNWOUND, signal.SIGINT, signal.SIGINT, signal.SIGTERM)[:2] == (7, "closed\n")


def test_an_interruption_is_postponed_to_the_end_of_a_transaction() -> None:
    assert _stopped(POSTPONED, signal.SIGTERM, signal.SIGINT) == (7, "complete\n", "")


def test_a_signal_that_does_not_end_a_blocking_call_is_repeated() -> None:
    code, _, err = _stopped(MISSED)
    assert (code, err) == (7, "")

"""A guard that a scheduler starts again and again: nothing of the earlier ones is forgotten."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.guard.guarded import GuardedRun


@pytest.mark.slow
def test_changes_and_checkpoints_of_all_earlier_guards_are_known(tmp_path: Path) -> None:
    # 1. Memory runs out at step 8 with micro-batch 8: it goes on from step 6 with 4.
    guarded = GuardedRun(tmp_path, FAULT="later step", STEP_SECONDS="0.5")
    guarded.wait_for("attempts/2")
    _kill(guarded)

    # 2. The second guard is killed as well, before it has a checkpoint of its own.
    guarded.resume()
    guarded.wait_for("attempts/3")
    _kill(guarded)

    # 3. The third one still knows both.
    code, messages = guarded.resume().end()
    assert code == 0, messages
    assert [arguments[0] for arguments in guarded.attempts] == ["8", "4", "4", "4"]
    for arguments in guarded.attempts[1:]:
        assert arguments[1].endswith("step_6"), "the only checkpoint so far"
    guarded.assert_complete()


def _kill(guarded: GuardedRun) -> None:
    os.kill(guarded.process.pid, signal.SIGKILL)
    guarded.end()
    guarded.wait_until_gone()

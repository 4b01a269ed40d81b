"""Faults of a guarded run: nothing is lost, no process is left, no restart goes on for ever.

`make test-guard-faults` runs each of them twenty times; the moment of a signal differs each time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.guard.guarded import GuardedRun

RUNS = range(int(os.environ.get("GUARD_FAULT_RUNS", "1")))
GRANDCHILD = {"WITH": "grandchild"}

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("run", RUNS)]


def _some_time(run: int) -> None:
    """Wait until somewhere in the training, another place for each run."""
    time.sleep(random.Random(run).uniform(0.0, 0.4))


def test_a_killed_guard_leaves_no_process_and_is_resumed(tmp_path: Path, run: int) -> None:
    guarded = GuardedRun(tmp_path, **GRANDCHILD)
    guarded.wait_for("out/step_3")
    _some_time(run)
    os.kill(guarded.process.pid, signal.SIGKILL)
    guarded.end()
    guarded.wait_until_gone()
    code, _ = guarded.resume().end()
    assert code == 0
    guarded.assert_complete()
    assert len(guarded.attempts[1]) == 2, "it goes on from a checkpoint"
    guarded.wait_until_gone()


def test_a_killed_command_is_restarted_unchanged(tmp_path: Path, run: int) -> None:
    guarded = GuardedRun(tmp_path, **GRANDCHILD)
    child = guarded.child()
    guarded.wait_for("out/step_3")
    _some_time(run)
    os.kill(child, signal.SIGKILL)
    code, messages = guarded.end()
    assert code == 0, messages
    guarded.assert_complete()
    assert [arguments[0] for arguments in guarded.attempts] == ["8", "8"]
    assert guarded.document["attempts"][0]["end"]["reason"] == "machine"
    guarded.wait_until_gone()


def test_a_killed_keeper_leaves_no_process(tmp_path: Path, run: int) -> None:
    guarded = GuardedRun(tmp_path, "--restarts", "0", STEP_SECONDS="0.1", **GRANDCHILD)
    guarded.wait_for("out/step_3")
    os.kill(guarded.keeper(), signal.SIGKILL)
    code, _ = guarded.end()
    assert code == 128 + signal.SIGKILL
    guarded.wait_until_gone()


def test_guard_and_command_killed_at_once(tmp_path: Path, run: int) -> None:
    guarded = GuardedRun(tmp_path, **GRANDCHILD)
    child = guarded.child()
    guarded.wait_for("out/step_3")
    _some_time(run)
    for pid in (guarded.process.pid, child):
        os.kill(pid, signal.SIGKILL)
    guarded.end()
    guarded.wait_until_gone()
    code, _ = guarded.resume().end()
    assert code == 0
    guarded.assert_complete()


def test_sigterm_during_a_checkpoint(tmp_path: Path, run: int) -> None:
    guarded = GuardedRun(tmp_path, WITH="slow save")
    guarded.wait_for("out/step_6/state.json")
    _some_time(run)
    guarded.process.terminate()
    code, messages = guarded.end()
    assert code == 128 + signal.SIGTERM, messages
    assert guarded.document["status"] == "stopped"
    guarded.wait_until_gone()
    code, _ = guarded.resume(WITH="").end()
    assert code == 0
    guarded.assert_complete()


def test_a_torn_checkpoint_is_skipped(tmp_path: Path, run: int) -> None:
    guarded = GuardedRun(tmp_path, FAULT="torn")
    code, messages = guarded.end()
    assert code == 0, messages
    assert guarded.attempts[1][1].endswith("step_6"), "step_9 is torn"
    assert "state.json is cut off" in messages
    guarded.assert_complete()


def test_a_full_disk_is_no_reason_to_try_again(tmp_path: Path, run: int) -> None:
    guarded = GuardedRun(tmp_path, FAULT="full disk")
    code, messages = guarded.end()
    assert code == 1
    assert len(guarded.attempts) == 1
    assert guarded.document["attempts"][0]["end"]["cause"] == "disk_or_permission"
    stored = json.loads((tmp_path / "out" / "step_6" / "state.json").read_text())
    assert stored["step"] == 6, messages


def test_the_disk_of_our_own_output_is_full(tmp_path: Path, run: int) -> None:
    guarded = GuardedRun(tmp_path, STEP_SECONDS="0")
    guarded.process.kill()
    guarded.end()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            guarded.resume().command,
            env=guarded.environment,
            stdout=full,
            timeout=100,
        )
    guarded.end()
    assert done.returncode == 0
    guarded.assert_complete()


@pytest.mark.parametrize("fault", ["load", "first step", "later step", "evaluate", "saving"])
def test_out_of_memory_anywhere_is_restarted_smaller(
    tmp_path: Path,
    run: int,
    fault: str,
) -> None:
    guarded = GuardedRun(tmp_path, FAULT=fault)
    code, messages = guarded.end()
    assert code == 0, messages
    assert [arguments[0] for arguments in guarded.attempts] == ["8", "4"]
    assert guarded.document["attempts"][0]["end"]["reason"] == "memory"
    guarded.assert_complete()


def test_memory_that_runs_out_each_time_ends_with_code_3(tmp_path: Path, run: int) -> None:
    guarded = GuardedRun(tmp_path, "--restarts", "9", FAULT="load", FAULT_TIMES="99")
    code, messages = guarded.end()
    assert code == 3, messages
    assert [arguments[0] for arguments in guarded.attempts] == ["8", "4", "2"], "none of them twice"
    assert guarded.document["status"] == "nothing_fits"


def test_a_machine_that_fails_each_time_ends_after_the_restarts(tmp_path: Path, run: int) -> None:
    guarded = GuardedRun(tmp_path, "--restarts", "2", FAULT="nccl", FAULT_TIMES="99")
    code, messages = guarded.end()
    assert code == 1
    assert len(guarded.attempts) == 3
    assert "--restarts 2 are used up" in messages


@pytest.mark.parametrize("fault", ["nccl", "watchdog", "lost gpu", "lost node"])
def test_a_lost_machine_is_restarted_unchanged(
    tmp_path: Path,
    run: int,
    fault: str,
) -> None:
    guarded = GuardedRun(tmp_path, FAULT=fault)
    code, messages = guarded.end()
    assert code == 0, messages
    assert [arguments[0] for arguments in guarded.attempts] == ["8", "8"], "micro-batch"
    assert guarded.attempts[1][1].endswith("step_6"), "the last checkpoint"
    assert guarded.document["attempts"][0]["end"]["reason"] == "machine"
    guarded.assert_complete()
    guarded.wait_until_gone()


def test_a_bug_is_never_tried_again(tmp_path: Path, run: int) -> None:
    guarded = GuardedRun(tmp_path, FAULT="bug")
    code, _ = guarded.end()
    assert code == 1
    assert len(guarded.attempts) == 1


def test_a_command_that_ignores_signals_is_ended_by_the_second(tmp_path: Path, run: int) -> None:
    guarded = GuardedRun(tmp_path, STEP_SECONDS="60", WITH="deaf grandchild")
    guarded.wait_for("attempts/1")
    time.sleep(0.5)
    guarded.process.terminate()
    time.sleep(1.5)
    assert guarded.process.poll() is None, "one signal is the command's to answer"
    guarded.process.terminate()
    code, _ = guarded.end()
    assert code == 128 + signal.SIGKILL
    assert len(guarded.attempts) == 1
    guarded.wait_until_gone()

"""The SLURM example with a real training, ended and requeued as SLURM does it: SIGCONT and SIGTERM
to every process of the job, SIGKILL to what is left after a grace time, the same file again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.probe.spawn import MARK_VARIABLE, marked
from tests.cli.command import environment
from tests.guard.short_grpo import SAVED_STEP, assert_each_step_once, make_short_run
from tests.guard.test_same_learning import REWARDS, ROOT
from tests.light_environment import light_python_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BIN = Path(sys.executable).parent
EXAMPLE = ROOT / "examples" / "guard" / "train.sbatch"
STEPS = 5
JOB = "77"

# The first start waits in its fourth step, so that the job ends in the middle of the training.
WAITS_ONCE = """

import signal
import time

unlimited = distinct


def distinct(completion_ids, trainer_state, **more):
    reached = Path("reached")
    if trainer_state.global_step == 3 and not reached.exists():
        IGNORES
        reached.touch()
        time.sleep(300)
    return unlimited(completion_ids, **more)
"""
IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """Job on one node, as slurmd runs it."""

    folder: Path
    restarts: int
    process: subprocess.Popen[str]

    def cancel(self, kill_wait: float) -> tuple[int, str]:
        """End the job for a requeue; return the exit code of its script, and what it printed.

        `kill_wait`: seconds, as SLURM's KillWait.
        """
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._send(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(kill_wait)
        self._send(signal.SIGKILL)
        return self.end(60)

    def end(self, seconds: float) -> tuple[int, str]:
        _, messages = self.process.communicate(timeout=seconds)
        return self.process.returncode, messages

    def _send(self, number: int) -> None:
        for pid in marked(str(self.folder)):
            with contextlib.suppress(OSError):
                os.kill(pid, number)


def _submitted(folder: Path, restarts: int = 0) -> SlurmJob:
    variables = {
        "SLURM_JOB_ID": JOB,
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_RESTART_COUNT": str(restarts),
        "GUARD": "--gpus cpu --no-proof",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": light_python_path(ROOT),
        MARK_VARIABLE: str(folder),
    }
    process = subprocess.Popen(
        ["bash", str(EXAMPLE)],
        cwd="/",
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return SlurmJob(
        folder=folder,
        restarts=restarts,
        process=process,
    )


def _document(folder: Path) -> dict[str, Any]:
    file = folder / "runs" / JOB / "guard" / "guard.json"
    document: dict[str, Any] = json.loads(file.read_text())
    return document


@pytest.mark.parametrize(
    ("trainer", "kill_wait", "code", "status"),
    [
        ("pass", 30.0, 128 + signal.SIGTERM, "stopped"),
        # The launcher ends by SIGTERM; the guard gives the trainer that it leaves five seconds.
        pytest.param(
            *(IGNORES_SIGTERM, 30.0, 128 + signal.SIGTERM, "stopped"), marks=pytest.mark.long
        ),
        (IGNORES_SIGTERM, 1.0, -signal.SIGKILL, "running"),
    ],
    ids=["ends by SIGTERM", "ignores SIGTERM", "is killed after the grace time"],
)
def test_a_requeued_job_goes_on_from_its_checkpoint(
    tmp_path: Path,
    trainer: str,
    kill_wait: float,
    code: int,
    status: str,
) -> None:
    # 1. The node is drained in the fourth step: the last checkpoint is that of the second.
    rewards = REWARDS + WAITS_ONCE.replace("IGNORES\n", f"{trainer}\n")
    make_short_run(tmp_path, STEPS, rewards)
    job = _submitted(tmp_path)
    deadline = time.monotonic() + 300
    while not (tmp_path / "reached").exists():
        assert job.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    exit_code, messages = job.cancel(kill_wait)
    assert exit_code == code, messages[-3000:]
    assert _document(tmp_path)["status"] == status
    assert not marked(str(tmp_path)), "a process is left"

    # 2. The scheduler runs the same file again.
    exit_code, messages = _submitted(tmp_path, restarts=1).end(400)
    assert exit_code == 0, messages[-3000:]
    document = _document(tmp_path)
    assert document["status"] == "finished" and document["steps"] == STEPS
    assert len(document["earlier_attempts"]) == 1
    (attempt,) = document["attempts"]
    assert attempt["from_step"] == SAVED_STEP
    assert_each_step_once(tmp_path, STEPS)

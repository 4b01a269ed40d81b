"""kill -9 of the tuner or of a probe: nothing keeps running, nothing measured is lost, nothing
is measured twice.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from pathlib import Path

import optuna
import pytest

from tests.cli.command import PROGRAM, autotune, environment
from tests.cli.test_run import _still_running
from tests.e2e.demo import demo_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("light_environment"),
]

FLAGS = [
    "--gpus",
    "cpu",
    "--space",
    "demo",
    "--hold",
    "use_vllm=false",
    "--search",
    "per_device_train_batch_size=4,8",
    "--hold",
    "max_completion_length=32",
    "--budget",
    "5m",
    "--out",
    "out",
]

MOMENTS = [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]
"""Seeds of the moment of the kill."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model(tmp_path_factory.mktemp("killed") / "model")


def _start(model: Path, cwd: Path, mark: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, "run", "--model", str(model), *FLAGS, *arguments],
        cwd=cwd,
        env=environment(AUTOTUNE_TEST_MARK=mark),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def _wait_for(process: subprocess.Popen[str], start: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(start):
            return
    raise AssertionError(f"it ended before it said {start!r}")


@pytest.mark.parametrize("seed", MOMENTS)
def test_the_tuner_is_killed(
    model: Path,
    tmp_path: Path,
    seed: int,
) -> None:
    mark = f"mark-{uuid.uuid4()}"
    with _start(model, tmp_path, mark) as process:
        _wait_for(process, "probe 2")
        time.sleep(random.Random(seed).uniform(0, 2.0))
        process.send_signal(signal.SIGKILL)
    assert _still_running(mark) == []

    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path}/out/study.db")
    measured = [trial for trial in study.get_trials() if trial.state.is_finished()]
    assert len(measured) >= 1

    done = autotune(
        "run", "--model", str(model), *FLAGS, "--resume", "--json", cwd=tmp_path, timeout=420
    )
    assert done.code == 0, done.err
    after = optuna.load_study(
        study_name=None, storage=f"sqlite:///{tmp_path}/out/study.db"
    ).get_trials()
    assert all(trial.state.is_finished() for trial in after)
    probed = []
    for trial in done.document["trials"]:
        if trial["purpose"] != "confirm":
            probed.append(str(trial["knobs"]))
    assert len(probed) == len(set(probed)) == 4


@pytest.mark.parametrize("seed", MOMENTS)
def test_a_probe_is_killed(
    model: Path,
    tmp_path: Path,
    seed: int,
) -> None:
    """Not out of memory, and not the candidate's fault as far as can be determined; the search
    continues."""
    mark = f"mark-{uuid.uuid4()}"
    with _start(model, tmp_path, mark, "--json") as process:
        _wait_for(process, "probe 2")
        time.sleep(random.Random(seed).uniform(0, 1.0))
        rank = _youngest_below(process.pid)
        os.kill(rank, signal.SIGKILL)
        assert process.stderr is not None
        stderr = process.stderr.read()
        assert process.wait(timeout=200) == 0, stderr
    assert _still_running(mark) == []
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path}/out/study.db")
    for trial in study.get_trials():
        assert not str(trial.user_attrs.get("outcome")).startswith("oom")


def _youngest_below(root: int) -> int:
    """The process started last below `root`: the rank."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        below = _descendants(root)
        if len(below) >= 2:
            return below[-1]
        time.sleep(0.01)
    raise AssertionError("no rank was seen")


def _descendants(root: int) -> list[int]:
    pids = []
    for task in Path(f"/proc/{root}/task").iterdir():
        for child in (task / "children").read_text().split():
            pids += [int(child), *_descendants(int(child))]
    return pids

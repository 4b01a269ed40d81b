"""Predictions, probes and rehearsals report to no tracker, whatever the user's environment
requests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.core.secrets import KEEP, without_side_effects
from autotune.emulator.launch import INJECTED
from autotune.frameworks.trl.look_worker import keeping_worker, worker_for
from autotune.probe import spawn

ONLINE = {
    "WANDB_MODE": "online",
    "WANDB_API_KEY": "k",
    "COMET_MODE": "online",
    "MLFLOW_TRACKING_URI": "http://tracker:5000",
    "TRACKIO_SPACE_ID": "me/runs",
    "SWANLAB_MODE": "cloud",
    "PATH": os.environ["PATH"],
}


def is_quiet(environment: dict[str, str]) -> bool:
    return (
        environment["WANDB_MODE"] == "disabled"
        and environment["COMET_MODE"] == "disabled"
        and not environment["MLFLOW_TRACKING_URI"].startswith("http")
        and not {"TRACKIO_SPACE_ID", "MLFLOW_RUN_ID"} & environment.keys()
    )


def test_probes_and_traces_are_quiet(tmp_path: Path) -> None:
    environment = spawn.environment(ONLINE, tmp_path, "mark")
    assert is_quiet(environment) and environment["MLFLOW_TRACKING_URI"].startswith(str(tmp_path))
    assert environment["PATH"] == ONLINE["PATH"]


def _no_config(model: str) -> None:
    raise AssertionError(model)


def test_an_inspected_script_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is a program that answers with the environment in which it was started."""
    for name, value in ONLINE.items():
        monkeypatch.setenv(name, value)
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\nread request\necho "{\\"wandb\\": \\"$WANDB_MODE\\", \\"uri\\":'
        ' \\"$MLFLOW_TRACKING_URI\\"}"\n'
    )
    program.chmod(0o755)
    request = {"script": "train.py"}
    with keeping_worker():
        answer, _ = worker_for(program, {}).ask(request, _no_config)
    assert answer["wandb"] == "disabled" and not answer["uri"].startswith("http")


def test_trackers_can_be_asked_for() -> None:
    assert without_side_effects({**ONLINE, KEEP: "1"}) == {**ONLINE, KEEP: "1"}


UPLOADS = (Path(__file__).parent / "programs/uploads.py.txt").read_text()


@pytest.mark.parametrize("keeps", ["0", "1"])
def test_a_rehearsed_command_uploads_nothing(tmp_path: Path, keeps: str) -> None:
    """The real client, in a process started as a rehearsal starts it; the address answers
    nobody.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(INJECTED),
        "AUTOTUNE_EMULATED_MACHINE": "none",
        KEEP: keeps,
        "HF_TOKEN": "no",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-c", UPLOADS]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=60,
    )
    assert (done.returncode == 0) is (keeps == "0"), done.stderr
    if keeps == "0":
        assert done.stdout.split() == ["me/model", "0" * 40]
        assert done.stderr.count("to the hub is off in a rehearsal") == 3

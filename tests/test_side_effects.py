"""Nothing that predicts, probes or rehearses reports to a tracker, whatever the user's environment says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.core.side_effects import KEEP, without_side_effects
from autotune.frameworks.trl import script_inspection
from autotune.probe import spawn

ONLINE = {
    "WANDB_MODE": "online", "WANDB_API_KEY": "k", "COMET_MODE": "online", "MLFLOW_TRACKING_URI": "http://tracker:5000",
    "TRACKIO_SPACE_ID": "me/runs", "SWANLAB_MODE": "cloud", "PATH": os.environ["PATH"],
}  # fmt: skip


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


def test_an_inspected_script_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is a program that answers with the environment in which it was started."""
    for name, value in ONLINE.items():
        monkeypatch.setenv(name, value)
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "{\\"wandb\\": \\"$WANDB_MODE\\", \\"uri\\": \\"$MLFLOW_TRACKING_URI\\"}"\n')
    program.chmod(0o755)
    answer, _ = script_inspection._run("train.py", (), program, None, 60.0)
    assert answer["wandb"] == "disabled" and not answer["uri"].startswith("http")


def test_trackers_can_be_asked_for() -> None:
    assert without_side_effects({**ONLINE, KEEP: "1"}) == {**ONLINE, KEEP: "1"}

"""examples/pipelines: each is really run, on a tiny model and a CPU, or read by what would read
it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from autotune.cli import autotune_command
from tests.cli.command import environment
from tests.light_environment import light_python_path
from tests.pipeline import make_project

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "pipelines"
LIMITS = "--gpus cpu --memory-limit 2G"


@pytest.mark.parametrize("name", ["train.sh", "train.sbatch"])
def test_shells_accept_them(name: str) -> None:
    for shell in ("sh", "bash") if name == "train.sh" else ("bash",):
        subprocess.run([shell, "-n", str(FOLDER / name)], check=True)


def test_the_shell_script_can_be_started_and_slurm_reads_its_options_first() -> None:
    assert os.access(FOLDER / "train.sh", os.X_OK)
    lines = (FOLDER / "train.sbatch").read_text().splitlines()
    options, commands = 0, 0
    for line in lines:
        if line.startswith("#SBATCH"):
            assert not commands, "SLURM stops to read options at the first command"
            options += 1
        elif line and not line.startswith("#"):
            commands += 1
    assert options and commands


def test_the_workflow_calls_what_there_is() -> None:
    flow = yaml.safe_load((FOLDER / "workflow.yml").read_text())
    assert set(flow["jobs"]) == {"predict", "train"}
    runs = []
    for task in flow["jobs"].values():
        for step in task["steps"]:
            if "run" in step:
                runs.append(step["run"])
    commands = [line.split() for line in runs if line.startswith("autotune ")]
    assert [command_line[1] for command_line in commands] == ["predict", "preflight"]
    for command_line in commands:
        command = autotune_command.get_command(None, command_line[1])  # type: ignore[arg-type]
        assert command is not None
        options = set()
        for parameter in command.params:
            for option in parameter.opts:
                options.add(option)
        flags = (
            {word for word in command_line[: command_line.index("--")] if word.startswith("--")}
            if "--" in command_line
            else set()
        )
        assert flags <= options


def test_the_configuration_is_one_that_trl_takes() -> None:
    from autotune.frameworks.trl.user_config import read_user_config

    read = read_user_config(FOLDER / "train.yaml")
    assert read.model and read.dataset and read.settings["per_device_train_batch_size"]


@pytest.fixture(scope="module", name="project")
def a_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("pipeline")).parent


def run(command: list[str], project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables_of_run = environment(
        PATH=programs,
        XDG_DATA_HOME=str(project / "data"),
        PREFLIGHT=LIMITS,
        PYTHONPATH=light_python_path(),
        **variables,
    )
    return subprocess.run(
        command,
        cwd=project,
        env=variables_of_run,
        capture_output=True,
        text=True,
        timeout=280,
    )


def check(
    done: subprocess.CompletedProcess[str],
    results: Path,
    *,
    measured: bool,
) -> None:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert ("Measuring its worst case" in done.stderr) is measured, (
        "the record answers from the second time on"
    )
    assert list(results.rglob("model.safetensors")), "the training itself ran and saved its model"


@pytest.mark.slow
def test_one_after_the_other_they_train(project: Path) -> None:
    """The first one proves the configuration, for all of them."""
    check(run(["sh", str(FOLDER / "train.sh")], project), project / "out", measured=True)
    checking = run(["make", "-f", str(FOLDER / "Makefile"), "check"], project)
    assert checking.returncode == 0, checking.stderr
    assert json.loads((project / "preflight.json").read_text())["from_record"]
    slurm = run(
        ["bash", str(FOLDER / "train.sbatch")],
        project,
        SLURM_JOB_ID="17",
        SLURM_SUBMIT_DIR=str(project),
    )
    check(slurm, project / "runs" / "17", measured=False)


@pytest.mark.slow
def test_python_proves_trains_and_watches(project: Path) -> None:
    settings = {**yaml.safe_load((project / "train.yaml").read_text()), "output_dir": "by-python"}
    (project / "python.yaml").write_text(yaml.safe_dump(settings))
    done = run(
        [sys.executable, str(FOLDER / "train.py")],
        project,
        CONFIG="python.yaml",
        OPTIONS="gpus=cpu memory_limit=2G",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "fits peak" in done.stderr and list((project / "by-python").rglob("model.safetensors"))

"""examples/guard, read by what would read it: the shell, YAML, and autotune's own parser."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from autotune.cli import autotune_command
from autotune.cli.exit_codes import BAD_INPUT, NOTHING_FITS

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "guard"
FILES = ["train.sbatch", "hf-job.sh", "sky.yaml", "job.yaml"]


@pytest.mark.parametrize("name", ["train.sbatch", "hf-job.sh", "ray.sh"])
def test_the_shell_accepts_it(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


def _guard_line(name: str) -> list[str]:
    """Return the words of the guard's command in a file."""
    text = (FOLDER / name).read_text().replace("\\\n", " ")
    if name == "job.yaml":
        container = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"][0]
        container_command: list[str] = container["command"]
        return container_command
    line = re.search(r"autotune guard [^;\n]*", text)
    assert line is not None
    return shlex.split(line[0].replace("${GUARD:-}", ""))


@pytest.mark.parametrize("name", FILES)
def test_its_command_is_one_that_the_program_takes(name: str) -> None:
    program, guard, *arguments = _guard_line(name)
    assert (program, guard) == ("autotune", "guard")
    command = autotune_command.get_command(click.Context(autotune_command), guard)
    assert command is not None
    context = command.make_context("guard", list(arguments))
    assert context.params["config"] in ("train.yaml", "$config")
    assert context.params["early"]


def test_what_a_scheduler_starts_again_goes_on() -> None:
    for name in ("train.sbatch", "sky.yaml", "job.yaml"):
        assert "--resume" in _guard_line(name), name
    assert "#SBATCH --requeue" in (FOLDER / "train.sbatch").read_text()


def test_kubernetes_ends_the_job_by_the_codes_that_another_pod_would_meet() -> None:
    spec = yaml.safe_load((FOLDER / "job.yaml").read_text())["spec"]
    rule = spec["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert rule["values"] == [BAD_INPUT, NOTHING_FITS]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy needs it"

"""examples/clusters: read by what would read it; the SLURM one is really run on Ray, where SLURM
is a few lines of shell.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from autotune.cli import autotune_command
from tests.cli.command import environment
from tests.light_environment import light_python_path

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "clusters"
SHELLS = ["bare.sh", "slurm.sbatch"]


@pytest.mark.parametrize("name", SHELLS)
def test_the_shell_accepts_them(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


def test_slurm_reads_its_options_first() -> None:
    lines = (FOLDER / "slurm.sbatch").read_text().splitlines()
    options, commands = 0, 0
    for line in lines:
        if line.startswith("#SBATCH"):
            assert not commands, "SLURM stops to read options at the first command"
            options += 1
        elif line and not line.startswith("#"):
            commands += 1
    assert options and commands


def test_the_job_of_kuberay_has_what_its_operator_wants() -> None:
    task = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    assert (task["apiVersion"], task["kind"]) == ("ray.io/v1", "RayJob")
    cluster = task["spec"]["rayClusterSpec"]
    pinned = (FOLDER.parents[1] / ".ci" / "constraints" / "cpu.txt").read_text()
    assert f"ray=={cluster['rayVersion']}" in pinned
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        for value in group["rayStartParams"].values():
            assert isinstance(value, str), "the operator takes strings only"
        pod = group["template"]["spec"]
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }
    workers = cluster["workerGroupSpecs"][0]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]


def test_none_is_open_to_everybody_or_names_a_password() -> None:
    for name in SHELLS:
        text = (FOLDER / name).read_text()
        assert (
            "RAY_AUTH_MODE=token" in text
            and "--include-dashboard=false" in text
            and "0.0.0.0" not in text
        )
    text = (FOLDER / "kuberay.yaml").read_text()
    task = yaml.safe_load(text)
    assert task["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert "--storage-file" in task["spec"]["entrypoint"] and "$" not in task["spec"]["entrypoint"]


@pytest.mark.parametrize("name", [*SHELLS, "kuberay.yaml"])
def test_they_ask_for_what_there_is(name: str) -> None:
    text = (FOLDER / name).read_text().replace("\\\n", " ")
    called = [line for line in text.splitlines() if re.search(r"autotune\"? run --config", line)]
    assert len(called) == 1
    command = autotune_command.get_command(None, "run")  # type: ignore[arg-type]
    assert command is not None
    options = set()
    for parameter in command.params:
        for option in parameter.opts:
            options.add(option)
    flags = {word for word in shlex.split(called[0].partition(" run ")[2]) if word.startswith("--")}
    assert {"--executor", "--gpus", "--budget"} <= flags <= options


SRUN = """#!/bin/bash
# One node: the one task of the allocation.
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo 127.0.0.1
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_one_for_slurm_measures_on_a_cluster_of_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from tests.e2e.demo import demo_model

    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    model = demo_model(tmp_path / "model")
    (tmp_path / "train.yaml").write_text(
        f"model_name_or_path: {model}\nmax_completion_length: 128\n"
    )
    variables = {
        "PATH": os.pathsep.join(
            [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "OUT": "out",
        "GPUS": "cpu",
        "BUDGET": "5m",
        "RAY_OPTIONS": "--num-cpus 1 --object-store-memory 100000000",
        "MORE": "--memory-limit 2G --max-probes 1 --hold use_vllm=false",
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "PYTHONPATH": light_python_path(),
    }
    done = subprocess.run(
        ["bash", str(FOLDER / "slurm.sbatch")],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert {"recommended.yaml", "launch.sh", "recommendation.json"} <= {
        file.name for file in (tmp_path / "out").iterdir()
    }

"""`autotune run --script`: from an unchanged script to one that trains with the measured
configuration."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.command import autotune, environment
from tests.pipeline import made_up_model

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("light_environment"),
]

OWN = Path(__file__).parents[1] / "own_scripts"
ASKED = [
    "--gpus",
    "cpu",
    "--memory-limit",
    "3G",
    "--budget",
    "4m",
    "--max-probes",
    "2",
    "--out",
    "out",
    "--fresh",
    "--json",
]
DEMO = ["--space", "demo", "--hold", "use_vllm=false", "--hold", "gradient_checkpointing=false"]

TRAINING = environment(ACCELERATE=str(Path(sys.executable).parent / "accelerate"))
"""Environment of a written launch.sh, which finds accelerate on PATH or by this variable."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(made_up_model(), tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a copy of the scripts in one of its own, so that neither is where the
    command is typed.
    """
    shutil.copytree(OWN, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def tuned(
    folder: Path,
    script: str,
    *flags: str,
    script_arguments: tuple[str, ...],
) -> Any:
    done = autotune(
        "run",
        "--script",
        f"mine/{script}",
        *ASKED,
        *flags,
        "--",
        *script_arguments,
        cwd=folder,
        timeout=400,
    )
    assert done.code == 0, done.err
    document = done.document
    assert document["recommendation"]["certificate"]["outcome"] == "ok"
    assert document["counts"]["loads"] == 1, (
        "the script runs once, and every candidate is measured on what it loaded"
    )
    return document


def before_and_after(folder: Path) -> None:
    assert not (folder / "trained").exists() and not (folder / "runs").exists(), (
        "a probe trained or saved something"
    )
    assert not (folder / "callback-was-here").exists()


def test_a_patch_of_the_call_really_trains(folder: Path, model: Path) -> None:
    unlike = ["--search", "per_device_train_batch_size=4"]
    document = tuned(folder, "plain.py", *DEMO, *unlike, script_arguments=(str(model),))
    before_and_after(folder)
    script = document["script"]
    assert script["rewards"] == "real" and script["reward_functions"] == [
        "length_reward",
        "brevity",
    ]
    assert script["changes"]["per_device_train_batch_size"] == 4 and not script["by_hand"]
    assert document["recommendation"]["certificate"]["user_reward_seconds"] > 0
    refused = subprocess.run(
        ["bash", "out/launch.sh"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    assert refused.returncode == 2 and "patch -p1" in refused.stderr
    subprocess.run(
        ["patch", "-p1", "-d", "mine", "-i", str(folder / "out" / "recommended.patch")],
        cwd=folder,
        check=True,
    )
    assert (
        "per_device_train_batch_size=4,  # as large as fits"
        in (folder / "mine" / "plain.py").read_text()
    )
    done = subprocess.run(
        ["bash", "out/launch.sh"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=TRAINING,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "trained").read_text() == "4 1 1"


def test_two_ranks(folder: Path, model: Path) -> None:
    document = tuned(
        folder,
        "plain.py",
        *DEMO,
        "--gpus",
        "2xcpu",
        "--search",
        "per_device_train_batch_size=4",
        script_arguments=(str(model),),
    )
    before_and_after(folder)
    effective = document["recommendation"]["certificate"]["effective"]
    assert (effective["world_size"], effective["wrapper"]) == (2, "DistributedDataParallel")
    assert effective["generation_batch_size"] == 2 * 8 * 2, (
        "what the script's own settings make of two ranks is held"
    )
    subprocess.run(
        ["patch", "-p1", "-d", "mine", "-i", str(folder / "out" / "recommended.patch")],
        cwd=folder,
        check=True,
    )
    done = subprocess.run(
        ["bash", "out/launch.sh"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=TRAINING,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "trained").read_text() == "4 2 1"


def test_flags_where_the_script_takes_them(folder: Path, model: Path) -> None:
    script_arguments = (
        f"--model_name_or_path {model} --use_cpu true --bf16 false --num_generations 4"
        " --max_completion_length 16 --use_peft"
    )
    document = tuned(
        folder,
        "parsed.py",
        *DEMO,
        "--search",
        "per_device_train_batch_size=4",
        script_arguments=tuple(script_arguments.split()),
    )
    before_and_after(folder)
    assert document["script"]["patch"] is None
    assert "--per_device_train_batch_size 4" in " ".join(document["script"]["flags"])
    assert any(
        "left out of probes" in warning and "Noisy" in warning for warning in document["warnings"]
    )
    assert (
        "--gradient_accumulation_steps 2 --gradient_checkpointing false"
        in (folder / "out" / "launch.sh").read_text()
    )
    assert document["recommendation"]["certificate"]["effective"]["lora_r"] == 16


def test_a_class_of_its_own_with_rewards_that_are_not_called(folder: Path, model: Path) -> None:
    document = tuned(
        folder, "own_class.py", *DEMO, "--rewards", "skip", script_arguments=(str(model),)
    )
    script = document["script"]
    assert script["rewards"] == "skip" and any(
        "rewards are not called" in warning for warning in document["warnings"]
    )
    assert (
        "is given as size"
        in script["by_hand"].get("per_device_train_batch_size", {"why": "is given as size"})["why"]
    )
    assert "beta" not in script["changes"]
    effective = document["recommendation"]["certificate"]["effective"]
    assert (effective["lora_r"], effective["beta"]) == (4, 0.04)
    assert not document["recommendation"]["certificate"]["user_reward_seconds"]
    assert document["question"]["weights"] == "real"


def test_supervised(folder: Path, model: Path) -> None:
    document = tuned(
        folder, "rows.py", "--hold", "gradient_checkpointing=false", script_arguments=(str(model),)
    )
    assert document["question"]["method"] == "sft"
    assert "gradient_checkpointing=False" in (folder / "out" / "recommended.patch").read_text()
    assert (
        yaml.safe_load((folder / "out" / "recommended.yaml").read_text())["gradient_checkpointing"]
        is False
    )


def test_what_the_look_refuses_is_an_exit_code(folder: Path, model: Path) -> None:
    (folder / "none.py").write_text("print('hello')\n")
    done = autotune("run", "--script", "none.py", "--gpus", "cpu", cwd=folder)
    assert done.code == 2 and "none.py ends and builds no GRPOTrainer" in done.err
    assert "Traceback" not in done.err

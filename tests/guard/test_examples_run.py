"""examples/guard, run: the machine is lost after the first checkpoint, the scheduler starts the
same command again, and the training goes on. Schedulers are stand-ins that only start what they
were given; training programs are stand-ins that only store checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.probe.spawn import MARK_VARIABLE, marked
from tests.cli.command import environment, shape_only

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "guard"
SECONDS = 100.0

# The examples are for GPUs: these flags stand for the machine.
AUTOTUNE = f"""#!/bin/bash
exec {sys.executable} -m autotune "$1" --gpus "${{GPUS:-cpu}}" --no-proof "${{@:2}}"
"""

# Stores a checkpoint at step 2 and waits for the end of the machine, or goes on to its own end.
TRL = """#!/bin/bash
echo "$@" >> starts
grep -h resume_from_checkpoint "$3" >> resumed
mkdir -p out/checkpoint-2
for file in optimizer.bin model.bin pytorch_model.bin; do echo x > out/checkpoint-2/$file; done
echo '{}' > out/checkpoint-2/trainer_state.json
if [ ! -e waits ]; then touch waits; sleep 60; fi
"""

# verl: its launch script starts `python3 -m verl.trainer.main_ppo`.
VERL = """#!/bin/bash
echo "$@" >> starts
for word in "$@"; do case $word in trainer.resume_from_path=*) echo "$word" >> resumed;; esac; done
mkdir -p out/global_step_2/actor
for file in data.pt actor/model_world_size_1_rank_0.pt actor/optim_world_size_1_rank_0.pt; do
  echo x > out/global_step_2/$file
done
if [ ! -e waits ]; then touch waits; sleep 60; fi
"""
VERL_LAUNCH = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
    " actor_rollout_ref.model.path=model data.train_batch_size=8 data.max_prompt_length=256"
    " data.max_response_length=64 actor_rollout_ref.actor.ppo_mini_batch_size=8"
    " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 trainer.n_gpus_per_node=1"
    " actor_rollout_ref.rollout.tensor_model_parallel_size=1"
    " actor_rollout_ref.rollout.name=vllm trainer.default_local_dir=out"
    " actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8\n"
)

RAY = """#!/bin/bash
[ "$1 $2 $3" = "job submit --address" ] && [ "$5" = -- ] || exit 64
cd /
exec "${@:6}"
"""

# A data set of the hub is a folder here; a job is the command in an empty folder.
HF = """#!/bin/bash
case "$1" in
auth) echo somebody;;
upload) shift; while [[ $1 == --* ]]; do [ $1 = --repo-type ] && shift; shift; done
  cp -r "$2" "$STORE_FOLDER/$3";;
download) cp -r "$STORE_FOLDER"/. .;;
jobs) shift 2
  while [[ $1 == --* ]]; do [ $1 = --env ] && export "$2"; shift 2; done
  shift; mkdir -p "$JOB_FOLDER"; cd "$JOB_FOLDER"; exec "$@";;
esac
"""


def _program(
    folder: Path,
    name: str,
    text: str,
) -> None:
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def _project(folder: Path) -> None:
    """A configuration that can be read, a launch script that can, and the programs they start."""
    shape_only(folder / "model")
    (folder / "prompts").mkdir()
    (folder / "prompts" / "train.jsonl").write_text('{"prompt": "one plus two"}\n')
    settings = {
        "model_name_or_path": "model",
        "dataset_name": "prompts",
        "output_dir": "out",
        "reward_funcs": ["get_soft_overlong_punishment"],
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "max_completion_length": 32,
        "bf16": False,
        "use_cpu": True,
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(settings))
    (folder / "train.sh").write_text(VERL_LAUNCH)
    (folder / "packages" / "verl").mkdir(parents=True)
    (folder / "packages" / "verl" / "__init__.py").touch()
    for name, text in {"autotune": AUTOTUNE, "trl": TRL, "python3": VERL, "ray": RAY}.items():
        _program(folder, name, text)


def _commands(folder: Path) -> dict[str, list[str]]:
    """Return what each scheduler starts on its machine."""
    sky = yaml.safe_load((EXAMPLES / "sky.yaml").read_text())
    kubernetes = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
    (container,) = kubernetes["spec"]["template"]["spec"]["containers"]
    assert container["workingDir"] == "/results"
    return {
        "train.sbatch": ["bash", str(EXAMPLES / "train.sbatch")],
        "sky.yaml": ["bash", "-c", sky["run"].replace("/results", str(folder))],
        "job.yaml": container["command"],
        "ray.sh": ["bash", str(EXAMPLES / "ray.sh"), "train.sh"],
    }


def _started(folder: Path, command: list[str], **variables: str) -> subprocess.Popen[str]:
    """Start a command on a machine whose processes carry one mark."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(
            PATH=f"{folder / 'bin'}:{os.environ['PATH']}",
            PYTHONPATH=f"{ROOT}:{folder / 'packages'}",
            HOME=str(folder),
            XDG_DATA_HOME=str(folder / "record"),
            SLURM_JOB_ID="7",
            SLURM_SUBMIT_DIR=str(folder),
            **{MARK_VARIABLE: str(folder), **variables},
        ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _lose_the_machine(folder: Path) -> None:
    for pid in marked(str(folder)):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


@pytest.mark.parametrize("name", ["train.sbatch", "sky.yaml", "job.yaml", "ray.sh"])
def test_the_second_start_goes_on_from_the_checkpoint(tmp_path: Path, name: str) -> None:
    _project(tmp_path)
    command = _commands(tmp_path)[name]
    gpus = {"GPUS": "1xA100-80G"} if name == "ray.sh" else {}  # the head has none
    process = _started(tmp_path, command, **gpus)
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "waits").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    _lose_the_machine(tmp_path)
    process.communicate(timeout=SECONDS)
    assert _document(tmp_path, name)["status"] == "running"

    process = _started(tmp_path, command, **gpus)
    _, messages = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, messages
    assert len(_lines(tmp_path / "starts")) == 2
    (resumed,) = _lines(tmp_path / "resumed")
    assert resumed.endswith(("out/checkpoint-2", "out/global_step_2")), "the checkpoint"
    assert _document(tmp_path, name)["status"] == "finished"


def _document(folder: Path, name: str) -> dict[str, Any]:
    results = folder / "runs" / "7" if name == "train.sbatch" else folder
    document: dict[str, Any] = json.loads((results / "guard" / "guard.json").read_text())
    return document


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_on_the_hub_stores_its_results_and_ends_as_the_training(
    tmp_path: Path, code: int
) -> None:
    _project(tmp_path)
    _program(tmp_path, "hf", HF)
    _program(tmp_path, "pip", "#!/bin/sh\n")
    _program(tmp_path, "trl", f"#!/bin/sh\nmkdir -p outputs; echo x > outputs/model; exit {code}\n")
    store = tmp_path / "store"
    store.mkdir()
    for name in ("model", "prompts"):
        (tmp_path / name).rename(store / name)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "grpo_autotune-1.0-py3-none-any.whl").touch()
    folders = {"STORE_FOLDER": str(store), "JOB_FOLDER": str(tmp_path / "job")}
    process = _started(tmp_path, ["bash", str(EXAMPLES / "hf-job.sh"), "train.yaml"], **folders)
    _, messages = process.communicate(timeout=SECONDS)
    assert process.returncode == code, messages
    assert (store / "outputs" / "model").exists()
    document = json.loads((store / "guard" / "guard.json").read_text())
    assert document["status"] == ("finished" if code == 0 else "script")

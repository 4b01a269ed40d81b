"""launch.sh starts what was measured: its environment, its server on GPUs of its own, its
processes.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.job import Task
from autotune.frameworks import trainer
from tests.frameworks.conftest import make_task

RECORDER = (Path(__file__).parent / "programs/recorder.sh").read_text()


def written(folder: Path, user_settings: Mapping[str, object] | None = None, **knobs: Any) -> Path:
    job_task: Task = make_task(4, "cuda")
    workload = replace(
        job_task.workload, python=folder / "nowhere" / "python", user_settings=user_settings or {}
    )
    job_task = replace(job_task, workload=workload)
    candidate = trainer("trl").complete(
        {"per_device_train_batch_size": 8, "num_generations": 8, **knobs}, job_task
    )
    trainer("trl").write_files(candidate, job_task, folder)
    return folder


def started(folder: Path, **environment: str) -> list[str]:
    """Return the command that the script runs, recorded by a substitute `python`."""
    recorder, record = folder / "python", folder / "seen"
    recorder.write_text(RECORDER)
    recorder.chmod(recorder.stat().st_mode | stat.S_IXUSR)
    variables = {**os.environ, "PYTHON": str(recorder), "SEEN": str(record), **environment}
    variables.pop(
        "CUDA_VISIBLE_DEVICES", None
    ) if "CUDA_VISIBLE_DEVICES" not in environment else None
    subprocess.run(
        [str(folder / "launch.sh"), "--max_steps", "3"],
        env=variables,
        check=True,
        timeout=60,
    )
    return record.read_text().splitlines()


@pytest.mark.parametrize(
    ("visible", "trains", "serves"), [(None, "0,1,2", "3"), ("4,5,6,7", "4,5,6", "7")]
)
def test_a_server_has_the_last_gpus_and_ends_with_the_trainer(
    visible: str | None,
    trains: str,
    serves: str,
    tmp_path: Path,
) -> None:
    folder = written(tmp_path, use_vllm=True, vllm_mode="server")
    lines = started(folder, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    server = next(line for line in lines if line.startswith("trl.scripts.vllm_serve "))
    training = next(line for line in lines if line.startswith("accelerate.commands.launch "))
    assert (
        f"gpus={serves} " in server
        and "--tensor_parallel_size 1" in server
        and "--gpu_memory_utilization 0.9" in server
    )
    assert f"gpus={trains} " in training and " -m trl.scripts.grpo --config " in training
    assert training.endswith("--vllm_server_port 8000 --max_steps 3")
    assert yaml.safe_load((folder / "accelerate.yaml").read_text())["num_processes"] == 3
    recommended = yaml.safe_load((folder / "recommended.yaml").read_text())
    assert recommended["vllm_mode"] == "server" and recommended["generation_batch_size"] == 8 * 3
    assert not {"server_gpus", "sharding"} & set(recommended)


def test_the_allocators_setting_is_exported_and_not_written_into_trls_file(tmp_path: Path) -> None:
    folder = written(tmp_path, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    (line,) = started(folder, ALONE="yes")
    assert (
        line.startswith("accelerate.commands.launch ") and "alloc=expandable_segments:True" in line
    )
    assert "PYTORCH_CUDA_ALLOC_CONF" not in (folder / "recommended.yaml").read_text()


def test_gpus_are_numbered_as_in_probes_and_no_other_allocator_setting_is_left(
    tmp_path: Path,
) -> None:
    folder = written(tmp_path, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    (folder / "python").write_text(
        '#!/usr/bin/env bash\necho "$CUDA_DEVICE_ORDER ${PYTORCH_ALLOC_CONF:-none}"\n'
    )
    (folder / "python").chmod(0o755)
    variables = {
        **os.environ,
        "PYTHON": str(folder / "python"),
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
    }
    output = subprocess.run(
        [str(folder / "launch.sh")],
        env=variables,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert output == "PCI_BUS_ID none\n"


def test_the_environment_of_the_users_file_is_set_before_the_ranks_start(tmp_path: Path) -> None:
    folder = written(tmp_path, user_settings={"env": {"TOKEN": "a b"}})
    (line,) = started(folder, ALONE="yes")
    assert " token=a b " in line


def test_offloading_and_nested_keys_reach_their_own_files(tmp_path: Path) -> None:
    knobs = {
        "sharding": "zero3",
        "offload_param_device": "cpu",
        "gradient_checkpointing_kwargs.use_reentrant": True,
    }
    folder = written(tmp_path, **knobs)
    launch = yaml.safe_load((folder / "accelerate.yaml").read_text())
    assert (
        launch["deepspeed_config"]["offload_param_device"] == "cpu"
        and launch["deepspeed_config"]["zero_stage"] == 3
    )
    recommended = yaml.safe_load((folder / "recommended.yaml").read_text())
    assert recommended["gradient_checkpointing_kwargs"] == {"use_reentrant": True}
    assert not {name for name in recommended if "." in name or name in knobs}

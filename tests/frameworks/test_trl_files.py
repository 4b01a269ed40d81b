"""The written files work: the real `trl grpo --config` takes them, and trains as we said it
would.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.job import Model, Task
from autotune.frameworks import trainer
from autotune.frameworks.dataset_measurement import measure_prompts
from autotune.frameworks.trl.field_list import fields
from autotune.worker.synthetic import tiny_config, write_model_folder
from tests.frameworks.conftest import make_task
from tests.light_environment import light_python_path

LIMIT = 30
REWARDS = """
import json, os
LONGEST = []
def spy(prompts, completion_ids, trainer_state=None, **columns):
    return [float(len(set(ids)) % 5) for ids in completion_ids]
"""
# Says what the trainer itself uses, from inside the real `trl grpo`: a callback's view of args, and
# the prompts it tokenises.
SPY = (Path(__file__).parent / "programs/spy.py.txt").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a dataset and rewards of the user's, in a folder whose name needs quoting."""
    place = tmp_path_factory.mktemp("it's a place")
    write_model_folder(place / "model", tiny_config(), weights=True)
    rows = [
        {"prompt": [{"role": "user", "content": "word " * (n % 40) + str(n)}], "answer": str(n)}
        for n in range(400)
    ]
    (place / "data").mkdir()
    (place / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "my_rewards.py").write_text(REWARDS)
    (place / "spy").mkdir()
    (place / "spy" / "sitecustomize.py").write_text(SPY)
    return place


@pytest.fixture
def task_at(place: Path) -> Callable[..., Task]:
    def make(ranks: int = 1, **workload: Any) -> Task:
        config = json.loads((place / "model" / "config.json").read_text())
        model = Model(
            name=str(place / "model"),
            config=config,
            folder=place / "model",
            origin="local folder",
        )
        return make_task(
            ranks, **{"model": model, "dataset": str(place / "data"), "global_batch": 8, **workload}
        )

    return make


KNOBS = {
    "per_device_train_batch_size": 4,
    "num_generations": 8,
    "max_completion_length": 16,
    "max_prompt_length": LIMIT,
    "gradient_checkpointing": False,
    "optim": "adamw_torch",
}


def run_for_two_steps(command: list[str], place: Path) -> list[dict[str, Any]]:
    """Return the settings of each rank's real trainer after two steps."""
    out = place / "said"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": light_python_path(place / "spy"),
        "SPY_OUT": str(out / "rank"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *command,
        "--max_steps",
        "2",
        "--save_strategy",
        "no",
        "--output_dir",
        str(place / "outputs"),
    ]
    done = subprocess.run(
        command,
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(path.read_text()) for path in sorted(out.iterdir())]


def agree(report: dict[str, Any], candidate: Any) -> None:
    """The trainer's own settings against ours, one by one."""
    compared = [
        name for name in candidate.settings if name in fields() and fields()[name].owner == "config"
    ]
    assert len(compared) > 12
    for name in compared:
        assert report[name] == candidate.settings[name], name
    assert report["dtype"] == f"torch.{candidate.settings['dtype']}"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_trl_takes_the_files_and_uses_what_we_said(
    ranks: int,
    place: Path,
    task_at: Callable[..., Task],
) -> None:
    task = task_at(
        ranks,
        held_values={"learning_rate": 1e-5, "beta": 0.04},
        user_settings={"reward_funcs": ["my_rewards.spy"]},
    )
    candidate = trainer("trl").complete(KNOBS, task)
    assert trainer("trl").why_illegal(candidate, task) is None
    paths = trainer("trl").write_files(candidate, task, place / f"out {ranks}")
    assert all(path.exists() for path in paths)
    ranks_said = run_for_two_steps([str(place / f"out {ranks}" / "launch.sh")], place)
    assert len(ranks_said) == ranks
    for report in ranks_said:
        agree(report, candidate)
        assert report["world_size"] == ranks and report["steps"] == 2
        assert report["generation_batch_size"] == 8 and report["rewards"] == ["spy"]
        assert report["learning_rate"] == 1e-5


@pytest.mark.slow
def test_the_longest_prompt_that_the_trainer_sees_is_the_limit(
    place: Path, task_at: Callable[..., Task]
) -> None:
    """Every filtered prompt is drawn: as many steps as there are rows would be long, so the
    batch holds them all.
    """
    task = task_at(1, user_settings={"reward_funcs": ["my_rewards.spy"]}, global_batch=None)
    unfiltered = measure_prompts(task, {"dataset_name": str(place / "data")}, limit=LIMIT, out=None)
    longest, kept_rows = unfiltered["longest_prompt"], unfiltered["kept"]
    assert isinstance(longest, int) and isinstance(kept_rows, int)
    assert longest > LIMIT, "the dataset must have something to drop"
    knobs = {
        **KNOBS,
        "per_device_train_batch_size": kept_rows,
        "num_generations": 2,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 4,
    }
    candidate = trainer("trl").complete(knobs, task)
    trainer("trl").write_files(candidate, task, place / "filtered")
    # `trl grpo --config` on the bare file, as the users would type it.
    trl = str(Path(sys.executable).parent / "trl")
    (report,) = run_for_two_steps(
        [trl, "grpo", "--config", str(place / "filtered" / "recommended.yaml")], place
    )
    assert report["rows"] == kept_rows and len(report["prompts"]) == 2 * 2 * kept_rows
    assert max(report["prompts"]) == LIMIT == unfiltered["longest_kept"]
    assert (
        json.loads((place / "filtered" / "prompts.json").read_text())["dropped"] == 400 - kept_rows
    )


@pytest.mark.slow
def test_without_a_dataset_or_rewards_the_file_still_runs(
    place: Path, task_at: Callable[..., Task]
) -> None:
    task = task_at(1, dataset=None)
    folder = place / "bare"
    trainer("trl").write_files(trainer("trl").complete(KNOBS, task), task, folder)
    text = (folder / "recommended.yaml").read_text()
    assert "PLACEHOLDER dataset_name" in text and "PLACEHOLDER reward_funcs" in text
    moved = folder.rename(place / "moved elsewhere")
    (report,) = run_for_two_steps([str(moved / "launch.sh")], place)
    assert report["steps"] == 2 and max(report["prompts"]) <= LIMIT


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_with_vllm_on_a_cpu_the_launch_script_works(
    place: Path, task_at: Callable[..., Task]
) -> None:
    """Real vLLM in the real `trl grpo`; that the weights reach the engine shows in how close its
    log-probabilities are.
    """
    task = task_at(
        1,
        held_values={"learning_rate": 1e-2, "logging_steps": 1},
        user_settings={"reward_funcs": ["my_rewards.spy"]},
    )
    candidate = trainer("trl").complete(
        {**KNOBS, "use_vllm": True, "vllm_gpu_memory_utilization": 0.2}, task
    )
    assert trainer("trl").why_illegal(candidate, task) is None
    trainer("trl").write_files(candidate, task, place / "with vllm")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    environment["PYTHON"] = sys.executable
    command = [
        str(place / "with vllm" / "launch.sh"),
        "--max_steps",
        "3",
        "--save_strategy",
        "no",
        "--output_dir",
        str(place / "v"),
    ]
    done = subprocess.run(
        command,
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    differences = [
        float(value)
        for value in re.findall(r"sampling_logp_difference/mean': '?([\d.e-]+)", done.stdout)
    ]
    assert len(differences) == 3 and max(differences) < 0.1, done.stdout[-2000:]


def test_the_users_own_settings_are_kept(
    tmp_path: Path,
    place: Path,
    task_at: Callable[..., Task],
) -> None:
    user = {
        "reward_funcs": ["my_rewards.spy"],
        "reward_weights": [1.0],
        "env": {"TOKEN": "x"},
        "output_dir": "my outputs",
        "num_processes": 4,
        "dataset_config": "main",
    }
    settings_held = {"learning_rate": 3e-6, "temperature": 0.7, "steps_per_generation": 4}
    task = task_at(
        1,
        held_values=settings_held,
        user_settings=user,
        dataset=str(place / "nothing here"),
    )
    trainer("trl").write_files(trainer("trl").complete(KNOBS, task), task, tmp_path)
    written = yaml.safe_load((tmp_path / "recommended.yaml").read_text())
    expected = {
        **settings_held,
        **user,
        **{name: value for name, value in KNOBS.items() if name != "max_prompt_length"},
    }
    del expected["num_processes"]
    assert {name: written.get(name) for name in expected} == expected
    assert "max_prompt_length" not in written and "num_processes" not in written
    assert "NOT FILTERED" in (tmp_path / "recommended.yaml").read_text(), (
        "a dataset out of reach must be said"
    )
    assert os.access(tmp_path / "launch.sh", os.X_OK)


def test_a_file_is_whole_or_absent(
    tmp_path: Path,
    task_at: Callable[..., Task],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = task_at(1, dataset=None)
    candidate = trainer("trl").complete(KNOBS, task)
    trainer("trl").write_files(candidate, task, tmp_path)
    before = (tmp_path / "recommended.yaml").read_text()

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        trainer("trl").write_files(
            trainer("trl").complete({**KNOBS, "num_generations": 4}, task), task, tmp_path
        )
    monkeypatch.undo()
    assert (tmp_path / "recommended.yaml").read_text() == before
    assert not list(tmp_path.rglob(".*")), "a partial file was left"

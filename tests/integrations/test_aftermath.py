"""The next smaller configuration: by the same rules as everywhere, and as a file that the
framework takes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog.space_files import load_space
from autotune.core.space import KnobValue
from autotune.diagnosis import Diagnosis
from autotune.diagnosis.remedies import advice_for
from autotune.frameworks.trl.trainers import TrlGrpo
from autotune.frameworks.trl.user_config import read_user_config
from autotune.integrations import oom_report
from autotune.integrations.oom_report import OomMoment, Running, next_smaller
from tests.frameworks.conftest import make_task

HELD: dict[str, KnobValue] = {
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "num_generations": 8,
    "max_completion_length": 1024,
    "gradient_checkpointing": False,
    "output_dir": "out",
}


def run(file: Path | None = None, **knobs: KnobValue) -> Running:
    settings = {**HELD, **knobs}
    shape = int(settings["per_device_train_batch_size"] or 0) * int(
        settings["gradient_accumulation_steps"] or 0
    )
    unsearched = {
        "dataset_name": "made/prompts",
        "reward_funcs": ["mine.reward"],
        "lora_target_modules": ["q_proj"],
    }
    task = make_task(
        kind="cuda",
        held_values=settings,
        config_file=file or Path("gone.yaml"),
        global_batch=shape,
        user_settings=unsearched,
    )
    trainer, space = TrlGrpo(), load_space("grpo")
    candidate = trainer.complete(trainer.baseline(space, task), task)
    return Running(
        task=task,
        trainer=trainer,
        space=space,
        candidate=candidate,
        from_file=file is not None,
    )


def diagnosis(cause: str) -> Diagnosis:
    bare = Diagnosis(
        known=True,
        is_memory=True,
        cause=cause,
        phase="backward",
    )
    return Diagnosis(**{**bare.__dict__, "remedies": advice_for(bare)})


@pytest.mark.parametrize(
    ("cause", "knobs", "change"),
    [
        ("activations", {}, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}),
        ("logits", {}, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}),
        (
            "activations",
            {"per_device_train_batch_size": 1, "num_generations": 2},
            {"gradient_checkpointing": True},
        ),
        ("optimizer", {}, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}),
        ("host_ram", {}, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}),
        (
            "weight_sync",
            {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5},
            {"vllm_gpu_memory_utilization": 0.4},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_neutral_changes_come_first(
    cause: str,
    knobs: dict[str, Any],
    change: dict[str, Any],
) -> None:
    smaller = next_smaller(run(**knobs), diagnosis(cause))
    assert smaller is not None and dict(smaller.change) == change and not smaller.learning


def test_learning_changes_are_the_last_resort_and_marked(tmp_path: Path) -> None:
    used_up = {
        "per_device_train_batch_size": 1,
        "num_generations": 2,
        "gradient_checkpointing": True,
    }
    smaller = next_smaller(run(**used_up), diagnosis("activations"))
    assert (
        smaller is not None
        and smaller.learning
        and dict(smaller.change) == {"max_completion_length": 512}
    )
    written = write(tmp_path, run(**used_up), "activations")
    assert written.read_text().startswith("# CHANGES WHAT IS LEARNED")


def write(
    folder: Path,
    running: Running,
    cause: str,
) -> Path:
    files = oom_report.write(
        folder,
        MemoryError("no memory"),
        diagnosis(cause),
        OomMoment(
            rank=3,
            world_size=4,
            step=17,
            reading=None,
        ),
        running,
    )
    assert [file.name for file in files] == ["rank3.json", "rank3.txt", "next.yaml"]
    return files[-1]


def test_the_file_is_the_users_own_with_that_change(tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text("output_dir: out\n")
    written = write(tmp_path / "after", run(config), "activations")
    read = read_user_config(written)
    assert (
        read.settings["per_device_train_batch_size"] == 8
        and read.settings["gradient_accumulation_steps"] == 4
    )
    assert read.dataset == "made/prompts" and read.rest["reward_funcs"] == ["mine.reward"]
    assert read.rest["lora_target_modules"] == ["q_proj"] and read.settings["output_dir"] == "out"
    text = written.read_text()
    assert (
        "What is learned stays the same" in text
        and "--per_device_train_batch_size 8" in text
        and "after step 17" in text
    )
    assert "in the script" not in text
    report = json.loads((tmp_path / "after" / "rank3.json").read_text())
    assert (
        report["rank"] == 3
        and report["step"] == 17
        and report["next"]["change"]
        == {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 4,
        }
    )
    assert (
        report["error"] == {"type": "MemoryError", "text": "no memory"}
        and report["cause"] == "activations"
    )


def test_ranks_that_fail_together_leave_one_configuration_and_a_diagnosis_each(
    tmp_path: Path,
) -> None:
    for rank in range(3):
        moment = OomMoment(
            rank=rank,
            world_size=3,
            step=1,
            reading=None,
        )
        oom_report.write(tmp_path, MemoryError(), diagnosis("activations"), moment, run())
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [
        "next.yaml",
        *(f"rank{rank}.{kind}" for rank in range(3) for kind in ("json", "txt")),
    ]
    assert yaml.safe_load((tmp_path / "next.yaml").read_text())["per_device_train_batch_size"] == 8


def test_without_a_configuration_there_is_still_a_diagnosis(tmp_path: Path) -> None:
    moment = OomMoment(
        rank=0,
        world_size=1,
        step=1,
        reading=None,
    )
    files = oom_report.write(tmp_path, MemoryError(), diagnosis("unknown_memory"), moment, None)
    assert [file.name for file in files] == ["rank0.json", "rank0.txt"]


def test_an_error_that_is_not_about_memory_is_none() -> None:
    try:
        raise ValueError("the dataset has no column 'prompt'")
    except ValueError as error:
        assert not oom_report.diagnosis_of(error).is_memory

"""Files in examples/, compared with what autotune writes and accepts today."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from autotune.catalog.space_files import load_space
from autotune.report.document_types import SCHEMA
from tests.frameworks.conftest import make_task

EXAMPLES = sorted(
    file.parent for file in (Path(__file__).parents[1] / "examples").glob("*/recommendation.json")
)


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_the_recommendation_is_legal_and_its_files_agree_with_it(folder: Path) -> None:
    from autotune.frameworks import trainer

    recommendation = json.loads((folder / "recommendation.json").read_text())
    assert (
        recommendation["schema"] == SCHEMA
        and recommendation["status"] == "ok"
        and recommendation["basis"] == "measured"
    )
    job, recommended = recommendation["question"], recommendation["recommendation"]
    space = load_space(job["space"])
    stated = re.search(r"--global-batch (\d+)", (folder / "README.md").read_text())
    global_batch = int(stated[1]) if stated else space.assume["global_batch"]
    task = make_task(global_batch=global_batch)
    candidate = trainer(job["framework"], job["method"]).complete(recommended["knobs"], task)
    assert trainer("trl").why_illegal(candidate, task) is None
    assert dict(candidate.settings) == recommended["settings"]
    assert recommended["peak_memory_bytes"] <= recommended["limit_bytes"]

    written = yaml.safe_load((folder / "recommended.yaml").read_text())
    for name, value in recommended["settings"].items():
        assert name not in written or written[name] == value, name
    for name in (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_completion_length",
        "num_generations",
    ):
        assert written[name] == recommended["settings"][name]
    assert os.access(folder / "launch.sh", os.X_OK)


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_no_path_of_the_machine_it_was_made_on_is_left(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            text = file.read_text(errors="replace")
            assert "/home/" not in text and "/tmp/" not in text and "/root/" not in text, file

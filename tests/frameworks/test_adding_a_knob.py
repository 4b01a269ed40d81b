"""The example of docs/adding-a-knob.md, as it stands there: a space, a legal candidate, and
files that carry the knob.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from autotune import frameworks
from autotune.catalog import space_files
from tests.frameworks.conftest import make_task

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-knob.md"
NEW = "torch_empty_cache_steps"


def example() -> str:
    (code,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(code)


def test_it_is_short() -> None:
    assert len(example().splitlines()) < 60


def test_its_knob_reaches_the_framework(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(example())
    space = space_files.load_space(str(tmp_path / "small.yaml"))
    trainer = frameworks.trainer(space.framework, space.method)
    task = make_task(
        1,
        "cuda",
        method="sft",
        tuning="lora",
        global_batch=16,
    )
    assert all(knob.name in trainer.fields() for knob in space.knobs)
    assert NEW not in {knob.name for knob in space_files.load_space(trainer.space).knobs}, (
        "an example of something that is there already"
    )
    knobs = {
        "max_length": 1024,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        NEW: 1,
    }
    candidate = trainer.complete(knobs, task)
    assert trainer.why_illegal(candidate, task) is None
    assert candidate.id != trainer.complete({**knobs, NEW: None}, task).id
    written = [
        path
        for path in trainer.write_files(candidate, task, tmp_path / "out")
        if path.suffix == ".yaml"
    ]
    assert any(yaml.safe_load(path.read_text()).get(NEW) == 1 for path in written)

"""The example of docs/adding-a-framework.md, as it stands there: under 60 lines, and really
measured.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import space_files
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.frameworks.base import Trainer
from autotune.probe.executors.local import LocalExecutor
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RunnerSettings
from tests.frameworks.conftest import make_task

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-framework.md"
SCRIPT = Path(__file__).parent / "scripts" / "plain_torch.py"


def block(language: str) -> str:
    (code,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(code)


@pytest.fixture
def plain(tmp_path: Path) -> Trainer:
    scope: dict[str, Any] = {"__file__": str(tmp_path / "plain.py")}
    exec(compile(block("python"), str(PAGE), "exec"), scope)
    (trainer,) = scope["TRAINERS"]
    return trainer  # type: ignore[no-any-return]


def test_it_is_short() -> None:
    assert len(block("python").splitlines()) < 60


def test_its_space_is_read_and_its_rule_is_told(plain: Trainer, tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text(block("yaml"))
    space, task = space_files.load_space(plain.space), make_task()
    assert plain.baseline(space, task) == {"bs": 2}
    assert "at most" in (plain.why_illegal(plain.complete({"bs": 10**6}, task), task) or "")


@pytest.mark.slow
def test_it_is_measured_and_its_script_runs(
    plain: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copy(SCRIPT, tmp_path / "train.py")
    monkeypatch.chdir(tmp_path)
    task = make_task()
    measurement = _measured(plain, task)
    assert measurement.outcome == "ok", measurement.failure
    assert (
        set(measurement.worst.cycle_loss_tokens) == {8 * 64}
        and len(measurement.worst.cycle_seconds) == 2
    )
    assert measurement.memory.peak_bytes > 50 * 2**20
    (script,) = plain.write_files(plain.complete({"bs": 8}, task), task, tmp_path / "out")
    assert f"{sys.executable} train.py --bs=8 --len=64" in script.read_text()


def _measured(trainer: Trainer, task: Task) -> Any:
    candidate = trainer.complete({"bs": 8}, task)
    executor = LocalExecutor(
        RunnerSettings(
            python=task.workload.python,
            adapter=trainer.adapter,
            ranks=1,
            limit_bytes=2**31,
        ),
        RequestBuilders(
            load=lambda probed: trainer.load_request(probed, task),
            probe=lambda probed, plan: trainer.probe_request(probed, task, plan),
        ),
    )
    try:
        return executor.open(candidate).measure(candidate, ProbePlan(timed_cycles=2))
    finally:
        executor.close()

"""The budget is wall clock, and kept."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cli.command import autotune
from tests.e2e.demo import demo_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_environment")]

# All of the demo's candidates take longer than the budgets, on a fast machine too.
SLOW_SHAPE = ("--hidden", "512", "--intermediate", "2048", "--layers", "8", "--vocab", "1024")


@pytest.mark.parametrize("seconds", [12, pytest.param(25, marks=pytest.mark.long)])
def test_the_search_ends_with_its_budget(tmp_path: Path, seconds: int) -> None:
    model = demo_model(tmp_path / "model", SLOW_SHAPE)
    started = time.monotonic()
    done = autotune(
        "run",
        "--model",
        str(model),
        "--gpus",
        "cpu",
        "--space",
        "demo",
        "--hold",
        "use_vllm=false",
        "--global-batch",
        "64",
        "--budget",
        f"{seconds}s",
        "--out",
        "out",
        "--json",
        cwd=tmp_path,
        timeout=120,
    )
    assert done.code in (0, 3, 5), done.err
    assert done.document["elapsed_seconds"] <= seconds + 3
    assert time.monotonic() - started <= seconds + 30  # starting and writing the files beside it
    assert done.document["proven"] in ("budget spent", "not proven infeasible")
    if done.document["recommendation"] is None:
        assert done.document["proven"] == "not proven infeasible"
        assert "Nothing was found out" in done.err or any(
            row["outcome"] != "interrupted" for row in done.document["trials"]
        )

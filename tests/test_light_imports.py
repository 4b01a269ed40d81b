"""Asking for help, or for a list, loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "torch",
    "trl",
    "transformers",
    "vllm",
    "optuna",
    "ray",
    "datasets",
    "accelerate",
    "peft",
    "sqlalchemy",
    "numpy",
}

LOG = Path(__file__).parent / "failures" / "samples" / "disk.txt"

RUN = (Path(__file__).parent / "programs/light_run.py.txt").read_text()


def _after(*arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["predict", "--help"],
        ["diagnose", "--help"],
        ["diagnose", str(LOG)],
        ["show", "knobs"],
        ["show", "models"],
        ["show", "gpus"],
        ["show", "spaces"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    result = _after(*arguments)
    assert result["code"] == 0
    assert result["said"]
    assert isinstance(result["modules"], list)
    assert HEAVY & set(result["modules"]) == set()


def test_importing_autotune_loads_none_of_its_rooms() -> None:
    code = (
        "import sys, autotune; print([name for name in sys.modules if"
        " name.startswith('autotune.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    import autotune

    for name in autotune.__all__:
        assert getattr(autotune, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        autotune.nope  # type: ignore[attr-defined]  # noqa: B018

"""The Python API: the command line's own words, and the same functions behind both."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

import autotune
from autotune.cli import autotune_command
from autotune.core.errors import BadInput, UnknownName
from autotune.core.events import CandidatePredicted, Event, JobStarted
from autotune.request.command_flags import PredictOptions, RunOptions, SolveOptions
from autotune.request.flags import Flags, flags_of, typed
from tests.cli.command import autotune as program
from tests.cli.command import shape_only

ROOMS = ["preflight"]
LOG = Path(__file__).parent / "failures" / "samples" / "disk.txt"


def test_every_flag_has_its_keyword() -> None:
    flags = {field.name for field in dataclasses.fields(Flags)}
    assert {
        *RunOptions.__annotations__,
        *PredictOptions.__annotations__,
        *SolveOptions.__annotations__,
    } == flags


@pytest.mark.parametrize("room", ROOMS)
def test_a_subpackage_does_not_replace_its_function(room: str) -> None:
    module = importlib.import_module(f"autotune.{room}")
    function = getattr(autotune, room)
    assert callable(function) and function is not module and function.__name__ == room
    assert importlib.import_module(f"autotune.{room}") is module


ASKED: list[dict[str, Any]] = [
    {},
    {
        "model": Path("model"),
        "gpus": "2xcpu",
        "lora_rank": 8,
        "seed": 7,
        "resume": True,
        "out": Path("a folder"),
    },
    {
        "hold": {"use_vllm": False, "learning_rate": 1e-6, "optim": "adamw_8bit"},
        "search": {"num_generations": (4, 8)},
    },
    {
        "hold": ["beta=0.0"],
        "budget": "5m",
        "mode": "probe",
        "sampler": "tpe",
        "storage": "sqlite:///x.db",
        "fresh": True,
    },
]


@pytest.mark.parametrize("arguments", ASKED, ids=str)
def test_typed_flags_mean_the_same(arguments: dict[str, Any]) -> None:
    flags = flags_of(arguments)
    command = autotune_command.get_command(click.Context(autotune_command), "run")
    assert command is not None
    parameters = command.make_context("run", typed(flags)).params
    values = {}
    for field in dataclasses.fields(Flags):
        if field.name in parameters:
            values[field.name] = parameters[field.name]
    assert Flags(**values) == flags


def test_a_password_is_not_typed_again() -> None:
    assert typed(Flags(storage="postgresql://me:secret@db/x")) == [
        "--storage",
        "postgresql://me:***@db/x",
    ]


def test_an_unknown_keyword_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="'max_completion_length'"):
        autotune.run(max_completion_lenght=3)  # type: ignore[call-arg]


def test_preflight_takes_nothing_that_would_change_the_configuration() -> None:
    with pytest.raises(UnknownName, match="Unknown keyword 'hold'"):
        autotune.preflight("train.yaml", hold={"beta": 0.1})  # type: ignore[call-arg]


def test_bad_input_is_an_exception_and_no_exit(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No model was named"):
        autotune.run(gpus="cpu", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_diagnose_takes_a_file_or_lines() -> None:
    diagnosis = autotune.diagnose(LOG)
    assert diagnosis.cause == "disk_or_permission" and diagnosis.known
    assert (
        autotune.diagnose(LOG.read_text().splitlines()) == diagnosis == autotune.diagnose(str(LOG))
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis.cause = "data"  # type: ignore[misc]
    with pytest.raises(BadInput, match="is a folder"):
        autotune.diagnose(LOG.parent)


@pytest.mark.slow
def test_predict_equals_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = shape_only(tmp_path / "model")
    heard: list[Event] = []
    settings = {"per_device_train_batch_size": 2, "gradient_checkpointing": True}
    forecast = autotune.predict(
        model=model,
        gpus="A100-40G",
        tuning="full",
        max_completion_length=64,
        set=settings,
        listener=heard.append,
    )
    assert (
        [type(event) for event in heard] == [JobStarted, CandidatePredicted]
        and forecast.prediction.fits is True
        and forecast.ways == ()
    )
    typed_again = (
        "--gpus A100-40G --tuning full --max-completion-length 64 --set"
        " per_device_train_batch_size=2 --json"
    )
    command = [
        "predict",
        "--model",
        str(model),
        *shlex.split(typed_again),
        "--set",
        "gradient_checkpointing=true",
    ]
    assert program(*command, cwd=tmp_path, timeout=200).document == json.loads(
        json.dumps(forecast.document)
    )


def _blocks() -> list[str]:
    text = (Path(__file__).resolve().parents[1] / "docs" / "python.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("block", _blocks(), ids=lambda block: block.splitlines()[-1][:40])
def test_examples_on_the_page_type_check(block: str, tmp_path: Path) -> None:
    """mypy reads it as a user's would: every function, keyword and attribute that it names is
    there, with that type.
    """
    from mypy import api

    preamble = "from typing import Any\nmy_reward: Any\nconfig: Any\ndata: Any\n"
    shown = tmp_path / "shown.py"
    shown.write_text(preamble + block)
    output, complaint, status = api.run(
        ["--strict", "--ignore-missing-imports", "--cache-dir", ".mypy_cache", str(shown)]
    )
    assert status == 0, output + complaint

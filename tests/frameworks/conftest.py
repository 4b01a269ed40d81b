"""A job to ask the trainer about, and the real GRPOConfig at any world size."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.core.job import Hardware, Model, Task, Workload
from autotune.frameworks.trl.look_worker import keeping_worker
from tests.pipeline import made_up_model


def make_task(ranks: int = 1, kind: str = "cpu", **workload: Any) -> Task:
    model = Model(
        name="made/up",
        config={"max_position_embeddings": 4096},
        folder=None,
        origin="catalogue",
    )
    hardware = Hardware(
        kind=kind,
        name=kind,
        count=ranks,
        memory_bytes=2**33,
        here=True,
    )  # type: ignore[arg-type]
    return Task(
        workload=Workload(
            **{"model": model, "python": Path(sys.executable), "tuning": "full", **workload}
        ),
        hardware=hardware,
    )


@pytest.fixture(name="make_task")
def make_job_fixture() -> Callable[..., Task]:
    return make_task


@contextlib.contextmanager
def world_of(ranks: int) -> Iterator[None]:
    """This process as rank 0 of `ranks`, by torch's own fake process group: what asks
    torch.distributed hears it.
    """
    if ranks == 1:
        yield
        return
    import torch.distributed as dist
    from accelerate.state import AcceleratorState
    from torch.testing._internal.distributed.fake_pg import FakeStore

    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    before = {
        name: os.environ.get(name)
        for name in (*variables, "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    }
    os.environ.update(
        variables,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        OMP_NUM_THREADS="1",
    )
    dist.init_process_group(
        "fake",
        rank=0,
        world_size=ranks,
        store=FakeStore(),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def refusal_of_trl(settings: dict[str, Any], ranks: int) -> str | None:
    """Return the refusal of the real GRPOConfig at the current world size; None if it accepts
    the settings.
    """
    from trl import GRPOConfig

    try:
        config = GRPOConfig(output_dir="unused", report_to="none", **settings)
    except (ValueError, ZeroDivisionError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    assert config.world_size == ranks, "the world size did not reach GRPOConfig"
    return None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, made in the training environment."""
    return shutil.copytree(made_up_model(), tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def inspection_folder(
    tmp_path_factory: pytest.TempPathFactory, light_environment: None
) -> Iterator[Path]:
    """Keep one process that inspects scripts for all tests of a file, since it imports TRL first.

    It has the folder and the environment of its start, which the tests share: offline, with
    nothing of the hub at hand.
    """
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch, keeping_worker():
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.chdir(folder)
        yield folder


@pytest.fixture
def empty_project(inspection_folder: Path) -> Iterator[Path]:
    """Yield the current folder of those tests, and empty it again."""
    yield inspection_folder
    for entry in inspection_folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@pytest.fixture
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, offline, with nothing of the hub at hand."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

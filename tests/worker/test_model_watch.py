"""Models measured inside a run's own processes, without an effect on the run."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.drive import inside

torch = pytest.importorskip("torch")

WIDE = 4 * 64 * 64
"""Bytes of a square layer in float32."""

FLEET = """
import torch

def layer():
    return torch.nn.Linear(64, 64, bias=False)

class Base:
    def __init__(self, **has):
        self.__dict__.update(has)

    def use(self):
        return "used"

class Judge(Base): ...
class Guest(Base): ...

class Trainer:
    def __init__(self, **has):
        self.__dict__.update(has)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self):
        self.model(torch.ones(1, 64)).sum().backward()
        self.optimizer.step()
        self.seen = None

    def turn(self):
        self.step()
        self.optimizer.zero_grad()
"""
HOLDERS = [
    {
        "cls": "fleet:Trainer",
        "noted": True,
        "models": {"reference": "beside.model", "reward": "rewards", "policy": "model"},
        "optimizer": "optimizer",
    },
    {
        "cls": "fleet:Judge",
        "noted": False,
        "models": {"critic": "model"},
        "optimizer": None,
    },
]
WATCH = {"steps": ["fleet:Trainer.step"], "uses": ["fleet:Base.use"], "holders": HOLDERS}


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a framework of the test's own with hooks."""
    gc.collect()  # what the test before this one made is gone
    (tmp_path / "fleet.py").write_text(FLEET)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "models").mkdir()
    finders = list(sys.meta_path)
    inside("model_watch").ModelWatch(WATCH, tmp_path / "models").install()
    yield importlib.import_module("fleet")
    sys.meta_path[:] = finders
    del sys.modules["fleet"]


def rank_bytes(folder: Path) -> Any:
    ranks = inside("model_watch").read_ranks(folder)
    return ranks[0]["bytes"] if ranks else None


def without_other(part_bytes: dict[str, int]) -> dict[str, int]:
    """Drop the models that other tests of this process left behind."""
    return {name: size for name, size in part_bytes.items() if not name.startswith("other")}


def test_each_model_has_the_role_that_its_holder_keeps_it_for(fleet: Any, tmp_path: Path) -> None:
    guest = fleet.Guest(model=fleet.layer())
    trainer = fleet.Trainer(
        model=fleet.layer(),
        beside=guest,
        rewards=[len, fleet.layer(), fleet.layer()],
    )
    trainer.turn()
    assert without_other(rank_bytes(tmp_path)) == {
        "weights": WIDE,
        "gradients": WIDE,
        "optimizer": 2 * WIDE,
        "reference_weights": WIDE,
        "reward_weights": 2 * WIDE,
    }


def test_models_of_a_process_without_training_are_measured_at_their_use(
    fleet: Any, tmp_path: Path
) -> None:
    judge = fleet.Judge(model=fleet.layer())
    assert rank_bytes(tmp_path) is None
    assert judge.use() == "used"
    assert without_other(rank_bytes(tmp_path)) == {"critic_weights": WIDE}


def test_a_model_without_a_known_holder_is_other(fleet: Any, tmp_path: Path) -> None:
    judge = fleet.Judge(model=fleet.layer())
    stray = torch.nn.Linear(512, 512, bias=False)
    judge.use()
    before = rank_bytes(tmp_path)["other_weights"]
    assert before >= 4 * stray.weight.numel()
    type(stray.weight)  # it lives until here


def test_an_engines_weights_are_left_out(fleet: Any, tmp_path: Path) -> None:
    engine_class = type("Engine", (torch.nn.Module,), {"__module__": "vllm.models"})
    engine = engine_class()
    engine.layers = torch.nn.ModuleList([torch.nn.Linear(2**11, 2**11, bias=False)])
    judge = fleet.Judge(model=fleet.layer())
    judge.use()
    assert (
        rank_bytes(tmp_path).get("other_weights", 0)
        < 4 * 2**22
        <= 4 * engine.layers[0].weight.numel()
    )


def test_models_that_alternate_count_at_their_own_maximum(fleet: Any, tmp_path: Path) -> None:
    """One model holds gradients while the other has freed its own."""
    first = fleet.Trainer(model=fleet.layer())
    first.turn()
    judge = fleet.Judge(model=fleet.layer())
    judge.use()
    part_bytes = without_other(rank_bytes(tmp_path))
    assert part_bytes == {
        "weights": WIDE,
        "gradients": WIDE,
        "optimizer": 2 * WIDE,
        "critic_weights": WIDE,
    }


def test_objects_frozen_by_an_engine_are_found(fleet: Any, tmp_path: Path) -> None:
    trainer = fleet.Trainer(model=fleet.layer())
    gc.freeze()
    try:
        trainer.turn()
    finally:
        gc.unfreeze()
    assert without_other(rank_bytes(tmp_path)) == {
        "weights": WIDE,
        "gradients": WIDE,
        "optimizer": 2 * WIDE,
    }


def test_a_measurement_after_a_step_replaces_earlier_ones(fleet: Any, tmp_path: Path) -> None:
    """Weights gathered for a pass, as under ZeRO-3, are gone after the step."""
    trainer = fleet.Trainer(model=fleet.layer())
    guest = fleet.Guest()
    trainer.model.gathered = torch.nn.Buffer(torch.zeros(256, 256))
    guest.use()
    assert without_other(rank_bytes(tmp_path))["weights"] == WIDE + 4 * 2**16
    del trainer.model.gathered
    trainer.turn()
    assert without_other(rank_bytes(tmp_path))["weights"] == WIDE


def test_a_pickled_class_finds_the_method_by_name(fleet: Any) -> None:
    """Ray copies inherited methods into a class of its own, and pickles that class."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    copied = type("Class", (fleet.Guest,), {"use": fleet.Guest.use})
    copied.__module__ = "nowhere"
    assert cloudpickle.loads(cloudpickle.dumps(copied))().use() == "used"
    assert b"model_watch" not in cloudpickle.dumps(copied)


def test_a_failed_measurement_is_reported_and_the_run_continues(
    fleet: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    judge = fleet.Judge(model=fleet.layer())
    (tmp_path / "models").rmdir()
    assert judge.use() == "used"
    assert "can't be summed up" in capsys.readouterr().err


def test_processes_of_one_rank_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    messages = [
        (0, {"weights": 5}),
        (0, {"reference_weights_on_host": 7, "weights": 1}),
        (1, {"weights": 3}),
        (2, {}),
    ]
    for number, (rank, parts) in enumerate(messages):
        (tmp_path / "models" / f"{number}.json").write_text(
            json.dumps({"rank": rank, "bytes": parts})
        )
    assert inside("model_watch").read_ranks(tmp_path) == [
        {"rank": 0, "bytes": {"weights": 6, "reference_weights_on_host": 7}},
        {"rank": 1, "bytes": {"weights": 3}},
    ]


def test_each_process_is_hooked_and_the_environments_sitecustomize_runs(tmp_path: Path) -> None:
    """Python imports one `sitecustomize`; ours runs the next one, in child processes, too."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import os\nos.environ['OWN'] = 'yes'\n")
    before = {**os.environ, "PYTHONPATH": str(tmp_path / "own")}
    says = (
        "import os, sys; print(os.environ.get('OWN'), 'autotune_worker.model_watch' in"
        " sys.modules, 'torch' in sys.modules)"
    )
    program = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {says!r}], check=True)"
    )
    added = inside("model_watch").environment(WATCH, tmp_path, before)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**before, **added},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["yes", "True", "False"]
    assert not done.stderr
    assert inside("model_watch").environment(None, tmp_path, before) == {}

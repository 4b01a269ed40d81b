"""Whole and torn checkpoints, written as torch and safetensors write them, then cut off."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

import pytest

from autotune import frameworks
from autotune.frameworks.resuming import Resuming
from autotune.guard.checkpoints import CheckpointFolder, problem_of

LAYOUTS = {
    "trl": ("grpo", {"output_dir": "out"}, "out/checkpoint-20"),
    "swift": ("grpo", {"output_dir": "out"}, "out/v0-20261126-231500/checkpoint-20"),
    "verl": (
        "grpo",
        {"trainer.project_name": "p", "trainer.experiment_name": "e"},
        "checkpoints/p/e/global_step_20",
    ),
    "openrlhf": ("grpo", {"ckpt.path": "ckpt"}, "ckpt/_actor/global_step20"),
    "skyrl": ("grpo", {"trainer.ckpt_path": "ckpt"}, "ckpt/global_step_20"),
    "prime-rl": ("grpo", {"output_dir": "outputs"}, "outputs/checkpoints/step_20"),
}


def layout_of(framework: str, method: str = "grpo") -> Resuming:
    layout = frameworks.trainer(framework, method).resuming
    assert layout is not None
    return layout


def write_checkpoint(folder: Path) -> Path:
    """Write a checkpoint of transformers, with one tensor of eight bytes."""
    folder.mkdir(parents=True)
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": tensor}).encode()
    content = struct.pack("<Q", len(header)) + header + b"\0" * 8
    (folder / "model.safetensors").write_bytes(content)
    for name in ("optimizer.pt", "scheduler.pt"):
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("data.pkl", b"x" * 1000)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 20}))
    return folder


def test_a_whole_checkpoint_has_no_problem(tmp_path: Path) -> None:
    assert problem_of(write_checkpoint(tmp_path / "checkpoint-20"), layout_of("trl")) is None


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"]
)
@pytest.mark.parametrize("length", [0, 5, -1])
def test_a_file_that_was_cut_off_is_named(
    tmp_path: Path,
    name: str,
    length: int,
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-20")
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content[:length])
    assert problem_of(checkpoint, layout_of("trl")) == f"{name} is cut off"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-20")
    (checkpoint / name).unlink()
    problem = problem_of(checkpoint, layout_of("trl"))
    assert problem is not None and problem.startswith("it has no ")


def test_the_newest_whole_one_is_used_and_torn_ones_are_named(tmp_path: Path) -> None:
    for step in (8, 9, 10):
        write_checkpoint(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-10" / "trainer_state.json").unlink()
    folder = CheckpointFolder(
        folder=tmp_path,
        layout=layout_of("trl"),
        since=0.0,
    )
    available = folder.find()
    assert available.newest is not None and available.newest.step == 9
    assert [checkpoint.step for checkpoint, _ in available.torn] == [10]


def test_checkpoints_of_an_earlier_run_are_never_used(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-20")
    for file in (*checkpoint.iterdir(), checkpoint):
        os.utime(file, (1000, 1000))
    folder = CheckpointFolder(
        folder=tmp_path,
        layout=layout_of("trl"),
        since=2000.0,
    )
    assert folder.find().newest is None


@pytest.mark.parametrize("framework", LAYOUTS)
def test_each_framework_finds_its_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    framework: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    method, settings, path = LAYOUTS[framework]
    layout = layout_of(framework, method)
    write_checkpoint(Path(path))
    folder = CheckpointFolder(
        folder=layout.folder_of(settings),
        layout=layout,
        since=0.0,
    )
    assert [checkpoint.path for checkpoint in folder.listed()] == [Path(path)]
    assert folder.listed()[0].step == 20
    assert layout.settings_for(Path(path), 20), "and goes on from it"


def test_a_pointer_names_the_checkpoint_that_is_used(tmp_path: Path) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path / "_actor" / f"global_step{step}")
    (tmp_path / "_actor" / "latest").write_text("global_step20")
    layout = layout_of("openrlhf")
    folder = CheckpointFolder(
        folder=tmp_path,
        layout=layout,
        since=0.0,
    )
    folder.point_to(folder.listed()[1])
    assert (tmp_path / "_actor" / "latest").read_text() == "global_step10"

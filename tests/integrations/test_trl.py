"""The callback on real TRL: memory really runs out, the error goes on as it was, and what helps
lies beside the checkpoints.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.cli.command import environment
from tests.light_environment import light_python_path
from tests.pipeline import made_up_model

SCRIPT = Path(__file__).with_name("run_out.py")
ROOM_MIB = "90"
"""Less than the chunk of the loss for 16 completions, more than anything before it."""


@pytest.fixture(name="model")
def a_model() -> Path:
    return made_up_model()


def run_out(
    folder: Path,
    model: Path,
    *arguments: str,
    launch: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    (folder / "model").symlink_to(model)
    command = [sys.executable, *launch, str(SCRIPT), str(folder), *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        env=environment(PYTHONPATH=light_python_path(root)),
        cwd=folder,
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["callback", "watch"])
def test_memory_really_runs_out(
    tmp_path: Path,
    model: Path,
    how: str,
) -> None:
    done = run_out(tmp_path, model, ROOM_MIB, how)
    assert done.returncode == 1, done.stderr[-3000:]
    last = done.stderr.strip().splitlines()[-4:]  # a progress bar may draw itself once more
    assert any(
        line.startswith("RuntimeError: [enforce fail at ") and "can't allocate memory" in line
        for line in last
    )
    assert "could not write down" not in done.stderr and "could not begin" not in done.stderr

    folder = tmp_path / "out" / "out-of-memory"
    assert sorted(file.name for file in folder.iterdir()) == [
        "next.yaml",
        "rank0.json",
        "rank0.txt",
    ]
    report = json.loads((folder / "rank0.json").read_text())
    assert (
        report["is_memory"]
        and report["numbers"]["asked_bytes"] > 0
        and report["error"]["type"] == "RuntimeError"
    )
    assert report["memory"]["by"].startswith("this process's limit"), (
        "the limit that was the nearest"
    )
    assert report["next"] == {
        "change": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
        "changes_what_is_learned": False,
        "file": "next.yaml",
    }
    following = yaml.safe_load((folder / "next.yaml").read_text())
    assert (
        following["per_device_train_batch_size"] * following["gradient_accumulation_steps"]
        == 16 * 2
    )
    assert following["steps_per_generation"] == 4, (
        "a generation makes as many completions as before"
    )
    text = (folder / "rank0.txt").read_text()
    assert (
        "memory ran out" in text
        and "Traceback (most recent call last):" in text
        and "In Python: " not in text
    )


@pytest.mark.slow
def test_of_two_ranks_the_one_that_failed_writes(tmp_path: Path, model: Path) -> None:
    launch = (
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        "0",
        "--rdzv-backend",
        "c10d",
    )
    done = run_out(tmp_path, model, ROOM_MIB, "callback", "1", launch=launch)
    assert done.returncode != 0
    folder = tmp_path / "out" / "out-of-memory"
    names = {file.name for file in folder.iterdir()}
    assert {"rank1.json", "rank1.txt", "next.yaml"} <= names
    report = json.loads((folder / "rank1.json").read_text())
    assert report["is_memory"] and report["rank"] == 1 and report["world_size"] == 2
    following = yaml.safe_load((folder / "next.yaml").read_text())
    assert (
        following["per_device_train_batch_size"] == 8
        and following["generation_batch_size"] == 16 * 2 * 2
    )


def test_a_run_that_ends_well_leaves_nothing_behind(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from autotune.integrations.trl import MemoryWatch

    state: dict[str, Any] = {}

    def reward(completions: list[str], **_: object) -> list[float]:
        state.update(wrapped="training_step" in vars(trainer), hook=sys.excepthook)
        return [1.0] * len(completions)

    config = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )
    callback, before = MemoryWatch(), sys.excepthook
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["one"] * 8}),
        callbacks=[callback],
    )
    trainer.train()
    assert state["wrapped"] and state["hook"] is not before, (
        "it found its trainer and listened while it trained"
    )
    assert (
        not {"training_step", "evaluate", "_save_checkpoint"} & set(vars(trainer))
        and sys.excepthook is before
    )
    assert callback.written == () and not (tmp_path / "out" / "out-of-memory").exists()
    assert callback._reading is not None and callback._reading.peak_bytes > 0

    error = RuntimeError("something else")
    monkeypatch.setattr(trainer, "compute_loss", lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    assert caught.value is error, "the very same error"
    assert not (tmp_path / "out" / "out-of-memory").exists(), "which is not about memory"
    sys.excepthook = before


def _begun(folder: Path, **options: Any) -> Any:
    """Callback in a run without access to the trainer."""
    from transformers import TrainerControl, TrainerState
    from trl import GRPOConfig

    from autotune.integrations.trl import MemoryWatch

    callback = MemoryWatch(folder=folder, **options)
    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    callback.on_train_begin(args, TrainerState(max_steps=100), TrainerControl(), optimizer=None)
    return callback, args


def test_uncaught_errors_reach_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: heard.append(error))
    callback, _ = _begun(tmp_path)
    error = MemoryError("no memory")
    sys.excepthook(MemoryError, error, None)
    assert heard == [error], "whoever listened before still does"
    assert {file.name for file in callback.written} == {"rank0.json", "rank0.txt"}
    written = (tmp_path / "rank0.json").stat().st_mtime_ns
    callback.out_of_memory(error)
    assert (tmp_path / "rank0.json").stat().st_mtime_ns == written, "each error is told once"


def test_trouble_of_its_own_does_not_disturb_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("no folder")
    callback, args = _begun(tmp_path / "file")
    callback.out_of_memory(MemoryError("no memory"))
    assert "autotune could not write down what happened" in caplog.text
    monkeypatch.setattr(callback, "_gauge", SimpleNamespace(read=lambda: 1 / 0))
    callback.on_step_end(args, SimpleNamespace(global_step=1), None)
    assert "autotune could not read memory: ZeroDivisionError" in caplog.text


def test_warnings_reach_the_given_function(tmp_path: Path) -> None:
    from autotune.integrations.memory_margin import GaugeReading

    heard: list[str] = []
    callback, args = _begun(tmp_path, warn=heard.append)
    callback._gauge = SimpleNamespace(
        read=lambda: GaugeReading(
            peak_bytes=97,
            limit_bytes=100,
            by="GPU 0",
        )
    )
    callback.on_step_end(args, SimpleNamespace(global_step=7), None)
    callback.on_log(
        args, SimpleNamespace(global_step=7), None, logs={"completions/max_length": 12.0}
    )
    assert len(heard) == len(callback.warnings) == 1 and heard[0].startswith(
        "step 7, rank 0: 3 B left of 100 B, GPU 0"
    )
    callback.on_train_end(args, None, None)

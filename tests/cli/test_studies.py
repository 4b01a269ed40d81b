"""Studies of other users are never changed."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from autotune.search.loop import baseline_candidate, legal_candidates
from autotune.search.study import open_study
from tests.cli.command import autotune, shape_only
from tests.simulated import MIB, ToyTrainer, stored_toy_job, toy_space


def _other_study(folder: Path) -> str:
    job = stored_toy_job(folder, toy_space(), 900 * MIB)
    open_study(job, legal_candidates(job, ToyTrainer()), baseline_candidate(job, ToyTrainer()))
    return job.storage


def _rows(database: Path) -> list[str]:
    """Everything in it. Its bytes may differ: opening it turns the write-ahead log on."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return list(connection.iterdump())


def test_a_study_of_another_space_under_the_same_name(tmp_path: Path) -> None:
    storage = _other_study(tmp_path)
    before = _rows(tmp_path / "study.db")
    shape_only(tmp_path / "model")
    flags = [
        "--model",
        "model",
        "--gpus",
        "cpu",
        "--space",
        "demo",
        "--storage",
        storage,
        "--study",
        "toy",
        "--out",
        "out",
    ]
    for resume in ([], ["--resume"]):
        done = autotune("run", *flags, *resume, cwd=tmp_path)
        assert done.code == 2, done.err
        assert "The study 'toy' was made for another request" in done.err and "space" in done.err
        assert "--study NAME" in done.err and "--fresh" in done.err
        assert "Traceback" not in done.err
        assert not (tmp_path / "out").exists()
    assert _rows(tmp_path / "study.db") == before

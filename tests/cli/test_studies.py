"""A study that is somebody else's is never touched."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from autotune.study import open_study
from autotune.tune import baseline_candidate, legal_candidates
from tests.cli.command import autotune, shape_only
from tests.simulated import MIB, ToyTrainer, toy_question, toy_space


def _other_study(folder: Path) -> str:
    question = toy_question(folder, toy_space(), 900 * MIB)
    open_study(question, legal_candidates(question, ToyTrainer()), baseline_candidate(question, ToyTrainer()))
    return question.storage


def _rows(database: Path) -> list[str]:
    """Everything in it. Its bytes may differ: opening it turns the write-ahead log on."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return list(connection.iterdump())


def test_a_study_of_another_space_under_the_same_name(tmp_path: Path) -> None:
    storage = _other_study(tmp_path)
    before = _rows(tmp_path / "study.db")
    shape_only(tmp_path / "model")
    flags = ["--model", "model", "--gpus", "cpu", "--space", "demo", "--storage", storage, "--study", "toy", "--out", "out"]
    for more in ([], ["--resume"]):
        done = autotune("run", *flags, *more, cwd=tmp_path)
        assert done.code == 2, done.err
        assert "The study 'toy' holds another question" in done.err and "space" in done.err
        assert "--study NAME" in done.err and "--fresh" in done.err
        assert "Traceback" not in done.err
        assert not (tmp_path / "out").exists()
    assert _rows(tmp_path / "study.db") == before

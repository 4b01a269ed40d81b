"""Databases whose records another program, or another version, wrote."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path

import pytest

from autotune.core.errors import StudyMismatch
from autotune.core.job import Job
from autotune.search.database_retry import MAX_WAIT_SECONDS
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.storage import open_storage
from autotune.search.study import Study, open_study
from autotune.search.trial_storage import CANDIDATE, MEASUREMENT
from tests.inline_executor import InlineExecutor
from tests.simulated import MIB, Machine, ToyTrainer, toy_job, toy_space


def _opened(job: Job) -> Study:
    trainer = ToyTrainer()
    return open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A resumed study with measurements in a database."""
    database = f"sqlite:///{tmp_path / 'study.db'}"
    job = toy_job(tmp_path, toy_space(), 900 * MIB, storage=database, resume=True)
    run_search(
        job,
        study=_opened(job),
        executor=InlineExecutor(measure=Machine(limit_bytes=900 * MIB).measure),
        listener=lambda event: None,
        clock=Clock(job.budget_seconds),
    )
    return job


def _write(
    job: Job,
    key: str,
    text: str,
) -> None:
    with sqlite3.connect(job.storage.removeprefix("sqlite:///")) as connection:
        written = connection.execute(
            "UPDATE trial_user_attributes SET value_json = ? WHERE key = ?", (text, key)
        )
        assert written.rowcount > 0


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (MEASUREMENT, json.dumps({"outcome": "a later one"})),
        (MEASUREMENT, "5"),
        (CANDIDATE, json.dumps({"settings": {}, "unknown": 1})),
        (CANDIDATE, "[]"),
    ],
)
def test_a_record_of_another_version_is_said_to_be_one(
    job: Job,
    key: str,
    text: str,
) -> None:
    _write(job, key, text)
    with pytest.raises(StudyMismatch, match=r"written by another version.*--fresh"):
        _opened(job)


def test_a_value_that_is_no_json_is_said_to_be_foreign(job: Job) -> None:
    _write(job, MEASUREMENT, "{")
    with pytest.raises(StudyMismatch, match=r"did not write.*--fresh"):
        _opened(job)


def test_a_foreign_table_of_studies_is_refused_at_once(tmp_path: Path) -> None:
    """Before, its missing column counted as a database that is away for a moment."""
    database = tmp_path / "other.db"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE studies (id INTEGER, title TEXT)")
    began = time.monotonic()
    with pytest.raises(StudyMismatch, match=r"tables of another program.*--storage"):
        open_storage(f"sqlite:///{database}").get_all_studies()
    assert time.monotonic() - began < MAX_WAIT_SECONDS / 2, "it was waited for"

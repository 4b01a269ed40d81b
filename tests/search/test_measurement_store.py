"""The user's store: what comes back, and what must not."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.answer import Recommendation
from autotune.core.job import Hardware, Job
from autotune.machine import nvml
from autotune.machine.local_files import record_folder
from autotune.search.record import (
    ANSWERS,
    MAX_RECORD_BYTES,
    Record,
    Store,
    StoredAnswer,
    circumstances,
)
from tests.report.answers import answered

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "trl": "1.16.0", "vllm": "0.31.0"}
CASE = answered(900)
QUESTION = replace(CASE.job, budget_seconds=600.0)


def record(job: Job = QUESTION, versions: dict[str, str] = VERSIONS) -> Record:
    return Record(job, versions)


def keep(answer: Recommendation = CASE.answer, job: Job = QUESTION) -> None:
    job_record = record(job)
    job_record.keep_answer(answer)
    Store().append(job_record.here, answer.trials, when="now")


def test_the_store_is_in_the_users_data_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert record_folder() == tmp_path / "autotune"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert record_folder() == Path("~/.local/share/autotune").expanduser()


def test_the_store_is_open_to_its_owner_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "autotune" / "answers").mkdir(parents=True, mode=0o755)
    keep()
    folders = [
        tmp_path / "autotune",
        *(path for path in (tmp_path / "autotune").iterdir() if path.is_dir()),
    ]
    assert {folder.name: folder.stat().st_mode & 0o777 for folder in folders} == {
        "autotune": 0o700,
        "answers": 0o700,
        "measurements": 0o700,
    }


def test_the_same_job_gets_the_same_answer_with_its_source() -> None:
    assert record().answer() is None
    keep()
    recorded = record().answer()
    assert recorded is not None
    assert recorded.from_record is not None
    assert recorded.winner is not None
    assert CASE.answer.winner is not None
    assert recorded.winner.candidate == CASE.answer.winner.candidate
    assert recorded.from_record.versions == VERSIONS
    assert recorded.from_record.where
    assert "UTC" in recorded.from_record.when
    assert recorded.counts == CASE.answer.counts
    assert recorded.trials == CASE.answer.trials


def test_measurements_come_back_as_they_were() -> None:
    keep()
    earlier = record().earlier()
    assert earlier.trials == CASE.answer.trials
    assert earlier.unreadable == 0


def _job(job: Job, **changes: Any) -> Job:
    return replace(job, task=replace(job.task, workload=replace(job.task.workload, **changes)))


def _hardware(job: Job, **changes: Any) -> Job:
    return replace(job, task=replace(job.task, hardware=replace(job.task.hardware, **changes)))


def _other_model(job: Job) -> Job:
    model = job.task.workload.model
    return _job(job, model=replace(model, config={**model.config, "hidden_size": 64}))


OTHERS: dict[str, Callable[[Job], Job]] = {
    "model's config": _other_model,
    "method": lambda job: _job(job, method="rloo"),
    "tuning": lambda job: _job(job, tuning="full"),
    "limit": lambda job: replace(job, memory_limit_bytes=job.memory_limit_bytes + 1),
    "device": lambda job: _hardware(job, name="another"),
    "devices": lambda job: _hardware(job, count=2),
    "device memory": lambda job: _hardware(job, memory_bytes=2**33),
}


@pytest.mark.parametrize("circumstance", OTHERS)
def test_under_other_circumstances_nothing_is_known(circumstance: str) -> None:
    keep()
    other_record = record(OTHERS[circumstance](QUESTION))
    assert other_record.answer() is None
    assert other_record.earlier().trials == ()


@pytest.mark.parametrize("package", [*VERSIONS, "flash-attn"])
def test_another_version_is_another_circumstance(package: str) -> None:
    keep()
    other_record = record(versions={**VERSIONS, package: "9.9"})
    assert other_record.answer() is None
    assert other_record.earlier().trials == ()


def test_another_driver_is_another_circumstance(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Hardware(
        kind="cuda",
        name="A100-40G",
        count=1,
        memory_bytes=40 * 2**30,
        here=True,
    )
    job = replace(QUESTION, task=replace(QUESTION.task, hardware=gpu))
    for driver in ("550.54", "570.12"):
        device = nvml.Device(
            name="NVIDIA A100",
            memory_bytes=40 * 2**30,
            driver_version=driver,
        )
        monkeypatch.setattr(
            "autotune.machine.hardware_detection.gpus_here", lambda device=device: (device,)
        )
        assert record(job).answer() is None
        assert record(job).earlier().trials == ()
        keep(job=job)
        assert record(job).answer() is not None


@pytest.mark.parametrize("name", ["max_completion_length", "num_generations", "batch"])
def test_other_lengths_or_choices_have_no_answer_but_what_was_measured_still_counts(
    name: str,
) -> None:
    keep()
    other_record = record(replace(QUESTION, space=QUESTION.space.with_choices({name: (3,)})))
    assert other_record.answer() is None
    assert (
        other_record.earlier().trials == CASE.answer.trials
    )  # by their settings: none is taken for one of the new lengths


def test_an_edited_file_that_the_question_names_is_another_circumstance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def reward(): return 1")
    job = _job(QUESTION, user_settings={"reward_funcs": ["rewards.reward"]})
    keep(job=job)
    assert record(job).answer() is not None
    (tmp_path / "rewards.py").write_text("def reward(): return 12345")
    assert record(job).answer() is None


def test_fresh_and_resume_ask_no_record() -> None:
    keep()
    assert record(replace(QUESTION, fresh=True)).answer() is None
    assert record(replace(QUESTION, fresh=True)).earlier().trials == ()
    assert record(replace(QUESTION, resume=True)).answer() is None


def test_an_answer_for_want_of_budget_serves_only_as_small_a_one() -> None:
    keep(replace(CASE.answer, proven="budget spent"))
    assert record(replace(QUESTION, budget_seconds=600.0)).answer() is not None
    assert record(replace(QUESTION, budget_seconds=601.0)).answer() is None
    assert record(replace(QUESTION, max_probes=QUESTION.max_probes + 1)).answer() is None


def test_an_interrupted_search_is_no_stored_answer() -> None:
    keep(replace(CASE.answer, interrupted=True))
    assert record().answer() is None


def _measurements() -> Path:
    (path,) = (record_folder() / "measurements").iterdir()
    return path


@pytest.mark.parametrize(
    "junk",
    [
        b"{",
        b"null",
        b"[" * 100_000,
        b"\xff\xfe\x00",
        b'{"schema": 99, "when": "", "trial": {}}',
        b'{"schema": 1, "when": "now", "trial": {"number": "x"}}',
        b'"' + b"a" * (MAX_RECORD_BYTES + 1) + b'"',
    ],
    ids=lambda junk: repr(junk[:20]),
)
def test_lines_that_cannot_be_read_are_passed_over_and_counted(junk: bytes) -> None:
    keep()
    path = _measurements()
    path.write_bytes(junk + b"\n" + path.read_bytes() + junk)
    earlier = record().earlier()
    assert earlier.trials == CASE.answer.trials
    assert earlier.unreadable == 2


def test_a_broken_answer_is_none() -> None:
    keep()
    (path,) = (record_folder() / "answers").iterdir()
    stored = path.read_bytes()
    for broken in (
        stored[:-5],
        b"",
        stored.replace(b'"schema":1', b'"schema":7', 1),
        json.dumps({"schema": 1}).encode(),
    ):
        path.write_bytes(broken)
        assert record().answer() is None
    path.write_bytes(stored)
    assert record().answer() is not None


def test_only_the_end_of_a_huge_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    keep()
    size = _measurements().stat().st_size
    monkeypatch.setattr("autotune.search.record.MAX_RECORDS_BYTES", size // 2)
    earlier = record().earlier()
    assert 0 < len(earlier.trials) < len(CASE.answer.trials)
    assert earlier.trials == CASE.answer.trials[-len(earlier.trials) :]


def _write_many(times: int) -> None:
    for _ in range(times):
        Store().append(circumstances(QUESTION, VERSIONS), CASE.answer.trials[:2], when="now")


def test_several_writers_leave_whole_lines() -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(30,)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    earlier = record().earlier()
    assert earlier.unreadable == 0
    assert len(earlier.trials) == 3 * 30 * 2


def test_a_file_instead_of_the_folder_stops_no_search(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file")
    store.append(record().here, CASE.answer.trials, when="now")
    assert store.measured(record().here).trials == ()
    assert store.kept(ANSWERS, record().here.job_key, StoredAnswer) is None


def test_every_field_of_a_circumstance_tells_apart() -> None:
    circumstance = circumstances(QUESTION, VERSIONS)
    for name in circumstance.facts:
        assert (
            dataclasses.replace(circumstance, facts={**circumstance.facts, name: "other"}).key
            != circumstance.key
        )

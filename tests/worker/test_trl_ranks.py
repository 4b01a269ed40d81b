"""Fault of one of several ranks: the probe ends on all, and no process remains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.job import Model, Task
from autotune.core.measurement import Outcome, ProbePlan
from autotune.core.space import Candidate
from autotune.frameworks import trainer
from autotune.probe.executors.local import LocalExecutor
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RunnerSettings
from autotune.worker import processes
from autotune.worker.synthetic import tiny_config
from tests.frameworks.conftest import make_task

ADAPTER = Path(__file__).with_name("in_trouble.py")
RANKS = 2
GENEROUS = ProbePlan(
    optimizer_steps=2,
    warmup_cycles=1,
    timed_cycles=1,
    deadline_seconds=240,
)
IMPATIENT = replace(GENEROUS, deadline_seconds=12)
SMALL = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_prompt_length": 64,
    "max_completion_length": 8,
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_environment")]


def task() -> Task:
    two_rank_task = make_task(RANKS)
    model = Model(
        name="tiny",
        config=tiny_config(
            vocab=4096,
            layers=4,
            hidden=256,
        ),
        folder=None,
        origin="made up",
    )
    return replace(two_rank_task, workload=replace(two_rank_task.workload, model=model))


def candidate(accumulation: int) -> Candidate:
    """Return a candidate; two micro-steps cause the fault, one does not."""
    return trainer("trl").complete({**SMALL, "gradient_accumulation_steps": accumulation}, task())


def two_ranks(adapter: str, folder: Path) -> LocalExecutor:
    trl, trl_task = trainer("trl"), task()
    return LocalExecutor(
        RunnerSettings(
            python=trl_task.workload.python,
            adapter=adapter,
            ranks=RANKS,
            limit_bytes=6 * 2**30,
            scratch_root=folder,
        ),
        RequestBuilders(
            load=lambda candidate: trl.load_request(candidate, trl_task),
            probe=lambda candidate, plan: trl.probe_request(candidate, trl_task, plan),
        ),
    )


@pytest.fixture
def executor(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[LocalExecutor]:
    monkeypatch.setenv("TROUBLE", request.param)
    local_executor = two_ranks(str(ADAPTER), tmp_path)
    yield local_executor
    local_executor.close()


def alive_under(executor: LocalExecutor) -> list[int]:
    assert executor.worker.pid is not None
    return processes.descendants(executor.worker.pid)


@pytest.mark.parametrize("executor", ["memory"], indirect=True)
def test_out_of_memory_on_one_rank_ends_the_probe_on_all(executor: LocalExecutor) -> None:
    well = executor.open(candidate(1)).measure(candidate(1), GENEROUS)
    assert well.outcome is Outcome.OK
    began = time.monotonic()
    measurement = executor.open(candidate(2)).measure(candidate(2), GENEROUS)
    assert measurement.outcome.is_out_of_memory, measurement.failure
    assert measurement.failure is not None
    assert measurement.failure.rank == 1
    assert measurement.failure.phase is not None
    assert str(measurement.outcome) == f"oom_{measurement.failure.phase}"
    # The other rank waits for its peer in a collective, for half an hour if it is let; nobody waits
    # for the deadline either.
    assert time.monotonic() - began < GENEROUS.deadline_seconds / 2
    assert alive_under(executor) == []
    assert executor.open(candidate(1)).measure(candidate(1), GENEROUS).outcome is Outcome.OK


@pytest.mark.parametrize("executor", ["python", "c"], indirect=True)
def test_a_rank_that_hangs_in_a_collective_is_ended_at_the_deadline(
    executor: LocalExecutor,
) -> None:
    assert executor.open(candidate(1)).measure(candidate(1), GENEROUS).outcome is Outcome.OK
    ranks = alive_under(executor)
    assert len(ranks) >= RANKS
    measurement = executor.open(candidate(2)).measure(candidate(2), IMPATIENT)
    assert measurement.outcome is Outcome.TIMEOUT
    assert measurement.failure is not None
    assert "deadline" in measurement.failure.evidence
    assert alive_under(executor) == []
    assert executor.open(candidate(1)).measure(candidate(1), GENEROUS).outcome is Outcome.OK

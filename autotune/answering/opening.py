"""From a question to the executor that can measure it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.environment import SUPPORTED
from autotune.executors.base import Executor
from autotune.question import ExecutorName, Question
from autotune.trainers.base import Trainer


def open_executor(question: Question, trainer: Trainer) -> Executor:
    """Starts nothing yet. Close it when done, which ends whatever it started. BadInput where there is no room for its slots."""
    job = question.job
    return _KINDS[question.executor](
        question,
        python=job.workload.python,
        adapter=trainer.adapter,
        ranks=job.hardware.count,
        load_request=lambda candidate: trainer.load_request(candidate, job),
        probe_request=lambda candidate, plan: trainer.probe_request(candidate, job, plan),
        limit_bytes=question.memory_limit_bytes,
        device_kind=job.hardware.kind,
        devices=job.hardware.count,
        supported_versions=SUPPORTED.get(trainer.name),
    )


def _on_this_machine(question: Question, **setting: Any) -> Executor:
    from autotune.executors.here import places_here
    from autotune.executors.local import LocalExecutor

    places = places_here(question.job.hardware, question.memory_limit_bytes, question.slots)
    return LocalExecutor(**setting, places=places)


def _on_a_cluster(question: Question, **setting: Any) -> Executor:
    from autotune.executors.ray import RayExecutor

    return RayExecutor(**setting, hardware=question.job.hardware, address=question.address, slots=question.slots)


_KINDS: Mapping[ExecutorName, Callable[..., Executor]] = {"local": _on_this_machine, "ray": _on_a_cluster}

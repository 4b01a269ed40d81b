"""A job for frameworks that are predicted by a stand-in step."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune import frameworks
from autotune.catalog import space_files
from autotune.catalog.model_lookup import find_model
from autotune.core.job import Hardware, Task, Workload
from autotune.core.space import Candidate, KnobValue
from autotune.frameworks.base import Trainer
from autotune.frameworks.rules import COMPARED, PLACEHOLDER, StatedRule

GIB = 2**30


def task(
    framework: str,
    method: str = "grpo",
    *,
    gpus: int = 8,
    tuning: str = "full",
    model: str = "Qwen2.5-7B",
    **settings_held: Any,
) -> Task:
    hardware = Hardware(
        kind="cuda",
        name="H100",
        count=gpus,
        memory_bytes=80 * GIB,
        here=False,
    )
    workload = Workload(
        model=find_model(model),
        method=method,
        framework=framework,
        python=Path(sys.executable),
        tuning=tuning,
        held_values=settings_held,  # type: ignore[arg-type]
    )
    return Task(workload=workload, hardware=hardware)


def case_of(
    framework: str,
    method: str = "grpo",
    *,
    settings: Mapping[str, KnobValue] | None = None,
    **about: Any,
) -> tuple[Trainer, Candidate, Task]:
    """The candidate that `predict` would be about."""
    job_task = task(framework, method, **about)
    job_task = Task(workload=_held(job_task, settings or {}), hardware=job_task.hardware)
    trainer = frameworks.trainer(framework, method)
    return (
        trainer,
        trainer.complete(
            trainer.baseline(space_files.load_space(trainer.space), job_task), job_task
        ),
        job_task,
    )


def _held(job_task: Task, settings: Mapping[str, KnobValue]) -> Workload:
    held_values = {**job_task.workload.held_values, **settings}
    return dataclasses.replace(job_task.workload, held_values=held_values)


def names_in(rule: StatedRule) -> set[str]:
    """The settings and sizes that a rule names."""
    compared = [COMPARED.fullmatch(value) for value in rule.when.values() if isinstance(value, str)]
    operands = {match[2] for match in compared if match and not match[2].isdigit()}
    return {*rule.when, *operands, *(match[1] for match in PLACEHOLDER.finditer(rule.text))}


def refusal(framework: str, method: str = "grpo", **about: Any) -> str | None:
    trainer, candidate, job_task = case_of(framework, method, **about)
    return trainer.why_illegal(candidate, job_task)

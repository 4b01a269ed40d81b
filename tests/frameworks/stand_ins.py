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
    **held: Any,
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
        held_values=held,  # type: ignore[arg-type]
    )
    return Task(workload=workload, hardware=hardware)


def asked(
    framework: str,
    method: str = "grpo",
    *,
    settings: Mapping[str, KnobValue] | None = None,
    **about: Any,
) -> tuple[Trainer, Candidate, Task]:
    """The candidate that `predict` would be about."""
    made = task(framework, method, **about)
    made = Task(workload=_held(made, settings or {}), hardware=made.hardware)
    trainer = frameworks.trainer(framework, method)
    return (
        trainer,
        trainer.complete(trainer.baseline(space_files.load_space(trainer.space), made), made),
        made,
    )


def _held(made: Task, settings: Mapping[str, KnobValue]) -> Workload:
    return dataclasses.replace(made.workload, held_values={**made.workload.held_values, **settings})


def names_in(rule: StatedRule) -> set[str]:
    """The settings and sizes that a rule names."""
    compared = [COMPARED.fullmatch(each) for each in rule.when.values() if isinstance(each, str)]
    operands = {found[2] for found in compared if found and not found[2].isdigit()}
    return {*rule.when, *operands, *(found[1] for found in PLACEHOLDER.finditer(rule.text))}


def refusal(framework: str, method: str = "grpo", **about: Any) -> str | None:
    trainer, candidate, made = asked(framework, method, **about)
    return trainer.why_illegal(candidate, made)

"""A job for frameworks that are predicted by a stand-in step."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune import spaces, trainers
from autotune.candidate import Candidate, KnobValue
from autotune.hardware import Hardware
from autotune.models import find_model
from autotune.trainers.base import Job, Trainer
from autotune.workload import Workload

GIB = 2**30


def job(
    framework: str, method: str = "grpo", *, gpus: int = 8, tuning: str = "full", model: str = "Qwen2.5-7B", **held: Any
) -> Job:
    hardware = Hardware(kind="cuda", name="H100", count=gpus, memory_bytes=80 * GIB, here=False)
    workload = Workload(
        model=find_model(model), method=method, framework=framework, python=Path(sys.executable), tuning=tuning, held=held,  # type: ignore[arg-type]
    )  # fmt: skip
    return Job(workload=workload, hardware=hardware)


def asked(
    framework: str, method: str = "grpo", *, settings: Mapping[str, KnobValue] | None = None, **about: Any
) -> tuple[Trainer, Candidate, Job]:
    """The candidate that `predict` would be about."""
    made = job(framework, method, **about)
    made = Job(workload=_held(made, settings or {}), hardware=made.hardware)
    trainer = trainers.trainer(framework, method)
    return trainer, trainer.complete(trainer.baseline(spaces.load_space(trainer.space), made), made), made


def _held(made: Job, settings: Mapping[str, KnobValue]) -> Workload:
    return dataclasses.replace(made.workload, held={**made.workload.held, **settings})


def refusal(framework: str, method: str = "grpo", **about: Any) -> str | None:
    trainer, candidate, made = asked(framework, method, **about)
    return trainer.why_illegal(candidate, made)

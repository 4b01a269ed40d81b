"""Question: everything that one `autotune run` was asked, settled and checked, before any GPU time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.space import SearchSpace
from autotune.trainers.base import Job, RowLengths

Mode = Literal["auto", "probe", "predict"]
SamplerName = Literal["value", "tpe", "gp", "random"]
ExecutorName = Literal["local", "ray"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to tune, within which limits, and where to keep what is found out."""

    job: Job
    space: SearchSpace
    """With every --hold and --search already applied."""

    memory_limit_bytes: int
    """Per GPU; on a CPU for the whole process tree."""

    budget_seconds: float
    max_probes: int
    mode: Mode
    sampler: SamplerName
    storage: str
    """An Optuna storage URL."""

    study_name: str
    out: Path
    data: RowLengths | None = None
    """How long the rows of the user's data are, where these were measured."""

    resume: bool = False
    fresh: bool = False
    executor: ExecutorName = "local"
    """Where probes run: on this machine, or on the nodes of a Ray cluster."""

    address: str | None = None
    """The cluster's; None for the one that Ray finds by itself."""

    slots: int | None = None
    """How many probes at a time; None for as many as there is room for (on a CPU one on each machine)."""

    @property
    def identity(self) -> dict[str, object]:
        """What makes two questions the same study: anything else may differ when one is resumed."""
        workload, hardware, script = self.job.workload, self.job.hardware, self.job.workload.script
        return {
            "model": workload.model.config,
            "method": workload.method,
            "framework": workload.framework,
            "tuning": workload.tuning,
            "weights": workload.weights,
            "dataset": workload.dataset,
            "global_batch": workload.global_batch,
            "typical_completion_length": workload.typical_completion_length,
            "held": dict(workload.held),
            "user_settings": dict(workload.user_settings),
            "hardware": [hardware.kind, hardware.name, hardware.count],
            "memory_limit_bytes": self.memory_limit_bytes,
            "space": self.space.name,
            "objective": self.space.objective,
            "choices": {knob.name: list(knob.choices) for knob in self.space.knobs},
            "relax": list(self.space.relax),
            "assume": dict(self.space.assume),
            **({} if script is None else {"script": [script.fingerprint, *script.arguments, script.rewards]}),
        }

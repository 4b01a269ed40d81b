"""Job: one request, parsed and checked before any GPU time is spent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.core.dataset import RowLengths
from autotune.core.space import SearchSpace
from autotune.core.task import Task

Mode = Literal["auto", "probe", "emulate", "predict"]
SamplerName = Literal["value", "tpe", "gp", "random"]
TrackerName = Literal["wandb", "trackio", "mlflow"]
ExecutorName = Literal["local", "ray"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Task, search space, limits and output locations."""

    task: Task
    space: SearchSpace  # with --hold and --search applied
    memory_limit_bytes: int  # per GPU; on a CPU for the process tree
    budget_seconds: float
    max_probes: int
    mode: Mode
    sampler: SamplerName
    storage: str  # Optuna storage URL
    study_name: str
    out: Path
    data: RowLengths | None = None  # row lengths of the user's data, where measured
    budget_adapts: bool = False  # nobody stated it: expensive probes extend it
    resume: bool = False
    fresh: bool = False
    executor: ExecutorName = "local"  # probes run on this machine or on a Ray cluster
    address: str | None = None  # Ray address; None: Ray's own discovery
    slots: int | None = None  # concurrent probes; None: as many as fit (on a CPU one per machine)

    @property
    def identity(self) -> dict[str, object]:
        """Return the values that must be equal when a study is resumed."""
        workload, hardware, script = self.task.workload, self.task.hardware, self.task.workload.script
        return {
            "model": workload.model.config, "method": workload.method, "framework": workload.framework,
            "tuning": workload.tuning, "weights": workload.weights, "dataset": workload.dataset,
            "global_batch": workload.global_batch, "typical_completion_length": workload.typical_completion_length,
            "held": dict(workload.held), "user_settings": dict(workload.user_settings),
            "hardware": [hardware.kind, hardware.name, hardware.count, *(["emulated"] if hardware.emulated else [])],
            "memory_limit_bytes": self.memory_limit_bytes, "space": self.space.name, "objective": self.space.objective,
            "choices": {knob.name: list(knob.choices) for knob in self.space.knobs},
            "relax": list(self.space.relax), "assume": dict(self.space.assume),
            **({} if workload.images is None else {"images": str(workload.images)}),
            **({} if script is None else {"script": [script.fingerprint, *script.arguments, script.rewards]}),
        }  # fmt: skip

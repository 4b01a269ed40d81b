"""Simulated cases of the search benchmark: models, cards and jobs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune import frameworks
from autotune.catalog import model_lookup
from autotune.catalog.space_files import read_space
from autotune.core.job import Hardware, Job, Task, Tuning, Workload
from autotune.core.space import Candidate, KnobValue
from autotune.core.units import MIB
from autotune.frameworks.base import Trainer
from autotune.machine import hardware_detection
from autotune.search.loop import baseline_candidate, legal_candidates

HERE = Path(__file__).resolve().parent
ONE_CARD: tuple[KnobValue, ...] = ("none",)
SEVERAL: dict[str, tuple[KnobValue, ...]] = {
    "lora": ("zero3", "ddp"),
    "full": ("zero3", "zero2", "ddp"),
}
ON_SEVERAL: dict[str, tuple[KnobValue, ...]] = {"num_generations": (16,), "use_vllm": (True,)}
"""Held values on several cards: one size of groups, and an engine that generates."""

CONTEXT_BYTES = 600 * MIB
"""Bytes below the card's size that the limit leaves to the driver."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Job whose answer the simulator contains."""

    name: str
    model: str
    gpus: str
    tuning: Tuning
    only: Mapping[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    """Knobs that are held to fewer values than the space has: what makes no sense there."""

    @property
    def hardware(self) -> Hardware:
        return hardware_detection.hardware(self.gpus)


CASES = (
    Case(
        name="qwen2.5-0.5b-full-4090",
        model="Qwen2.5-0.5B",
        gpus="RTX4090",
        tuning="full",
    ),
    Case(
        name="qwen2.5-1.5b-lora-l4",
        model="Qwen2.5-1.5B",
        gpus="L4",
        tuning="lora",
    ),
    Case(
        name="qwen2.5-3b-lora-a100-40g",
        model="Qwen2.5-3B",
        gpus="A100-40G",
        tuning="lora",
    ),
    Case(
        name="qwen2.5-7b-lora-a100-80g",
        model="Qwen2.5-7B",
        gpus="A100-80G",
        tuning="lora",
    ),
    Case(
        name="llama-3.1-8b-lora-2xa100-40g",
        model="Llama-3.1-8B",
        gpus="2xA100-40G",
        tuning="lora",
        only=ON_SEVERAL,
    ),
    Case(
        name="qwen2.5-1.5b-full-4xl4",
        model="Qwen2.5-1.5B",
        gpus="4xL4",
        tuning="full",
        only=ON_SEVERAL,
    ),
    Case(
        name="qwen2.5-7b-full-4xa100-80g",
        model="Qwen2.5-7B",
        gpus="4xA100-80G",
        tuning="full",
        only={
            "sharding": ("zero3", "zero2"),
            "vllm_tensor_parallel_size": (1,),
            "vllm_gpu_memory_utilization": (0.2, 0.3, 0.4),
        }
        | ON_SEVERAL,
    ),
    Case(
        name="qwen2.5-14b-lora-1xh100",
        model="Qwen2.5-14B",
        gpus="H100",
        tuning="lora",
    ),
    Case(
        name="llama-3.1-70b-lora-8xb200",
        model="Llama-3.1-70B",
        gpus="8xB200",
        tuning="lora",
        only={
            "vllm_tensor_parallel_size": (4, 8),
            "vllm_gpu_memory_utilization": (0.12, 0.16, 0.2, 0.3),
        }
        | ON_SEVERAL,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Posed:
    """Job with everything that the search receives besides measurements."""

    job: Job
    trainer: Trainer
    candidates: tuple[Candidate, ...]
    baseline: Candidate | None


def pose(case: Case) -> Posed:
    """The case's question, as `autotune run` would put it there."""
    hardware = case.hardware
    choices: dict[str, Sequence[KnobValue]] = {"sharding": ONE_CARD}
    if hardware.count > 1:
        choices = {
            "sharding": SEVERAL[case.tuning],
            "vllm_tensor_parallel_size": (1, hardware.count),
        }
    choices |= case.only
    workload = Workload(
        model=model_lookup.find_model(case.model),
        python=Path(sys.executable),
        tuning=case.tuning,
        global_batch=64,
    )
    return posed(
        Task(workload=workload, hardware=hardware),
        "cards",
        choices,
        hardware.memory_bytes - CONTEXT_BYTES,
    )


def posed(
    task: Task,
    space: str,
    choices: dict[str, Sequence[KnobValue]],
    limit_bytes: int,
) -> Posed:
    """Return a task's job over one of the frozen spaces."""
    job = Job(
        task=task,
        space=read_space(HERE / "spaces" / f"{space}.yaml").with_choices(choices),
        memory_limit_bytes=limit_bytes,
        budget_seconds=1e9,
        max_probes=100,
        mode="probe",
        sampler="tpe",
        storage="memory://",
        study_name="bench",
        out=Path("unused"),
    )
    trainer = frameworks.trainer(task.workload.framework, task.workload.method)
    return Posed(
        job=job,
        trainer=trainer,
        candidates=legal_candidates(job, trainer),
        baseline=baseline_candidate(job, trainer),
    )

"""Shares of the rollout engine where autotune's meaning meets that of a training without it.

`core/engine_share.py` defines the two meanings: within autotune a share is one of the memory limit,
in files, scripts and commands one of the whole GPU. This module converts at every such place: the
user's file is read, files are written, a framework's own command is probed.

On a CPU no share is converted: vLLM counts other memory there than the limit does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from autotune import catalog
from autotune.core.engine_share import share_of_gpu, share_of_limit, share_scale
from autotune.core.job import Hardware, Job, Task
from autotune.core.space import Candidate, KnobValue, is_number
from autotune.core.units import format_bytes
from autotune.estimate.engine_use import shared_bytes
from autotune.frameworks.base import Field, Settings, Trainer
from autotune.frameworks.trl.settings import with_server
from autotune.machine.hardware_detection import gpu_of

NAME = "gpu_memory_utilization"  # vLLM's setting, which every framework passes on with a prefix
SGLANG = "sglang"
LAUNCHED = "launched_command"  # adapter of frameworks that are probed by their own command


def is_share(name: str) -> bool:
    """Return True for a setting that is an engine's share."""
    return name.endswith(NAME)


def scale_of(hardware: Hardware, limit_bytes: int) -> float:
    """Return the share of the GPU for each share of the limit; 1 without a limit."""
    if hardware.kind == "cpu":
        return 1.0
    gpu = gpu_of(hardware)
    limited = shared_bytes(hardware.memory_bytes, limit_bytes, gpu)
    return share_scale(limited, shared_bytes(hardware.memory_bytes, None, gpu))


# Within autotune.


def within_limit(
    settings: Settings,
    scale: float,
    fields: Mapping[str, Field],
) -> dict[str, KnobValue]:
    """Return the settings of the user's file with shares of the limit. Where its engine has the
    framework's default share, that is one of the GPU as well.
    """
    if scale == 1.0:
        return dict(settings)
    stated = dict(settings)
    if stated.get("use_vllm") and not with_server(stated):
        for name, field in fields.items():
            if is_share(name) and isinstance(field.default, float):
                stated.setdefault(name, field.default)
    return _with_shares(stated, lambda share: share_of_limit(share, scale))


def with_room(
    job: Job,
    taken_bytes: int,
    fields: Mapping[str, Field],
) -> Job:
    """Lower the limit so that other processes can take so much of what CUDA offers of the
    device.
    """
    hardware = job.task.hardware
    offered = round(catalog.offered(hardware.memory_bytes, gpu_of(hardware)).value)
    limit_bytes = max(1, min(job.memory_limit_bytes, offered) - taken_bytes)
    return with_limit(job, limit_bytes, fields)


def with_limit(
    job: Job,
    limit_bytes: int,
    fields: Mapping[str, Field],
) -> Job:
    """Return the job of a user's file with a lower limit: the engine keeps its share of the GPU."""
    workload = job.task.workload
    hardware = job.task.hardware
    scale = scale_of(hardware, limit_bytes) / scale_of(hardware, job.memory_limit_bytes)
    held_values = within_limit(workload.held_values, scale, fields)
    task = replace(job.task, workload=replace(workload, held_values=held_values))
    return replace(job, task=task, memory_limit_bytes=limit_bytes)


# In files and commands.


def for_files(candidate: Candidate, job: Job) -> tuple[Candidate, Task]:
    """Return candidate and task with shares of the GPU, to be written into files."""
    scale = scale_of(job.task.hardware, job.memory_limit_bytes)
    if scale == 1.0:
        return candidate, job.task

    def of_gpu(settings: Settings) -> dict[str, KnobValue]:
        return _with_shares(settings, lambda share: share_of_gpu(share, scale))

    written = Candidate(
        knobs=of_gpu(candidate.knobs),
        settings=of_gpu(candidate.settings),
        load=candidate.load,
    )
    workload = job.task.workload
    workload = replace(
        workload, held_values=of_gpu(workload.held_values), defaults=of_gpu(workload.defaults)
    )
    return written, replace(job.task, workload=workload)


def for_probe(
    candidate: Candidate,
    job: Job,
    trainer: Trainer,
) -> tuple[Candidate, Task]:
    """Return candidate and task as the request of a probe takes them.

    A framework's own command gets shares of the GPU. TRL's trainer runs inside the worker, which
    scales them itself. SGLang's share is one of the memory that is free at its start, which a probe
    has limited by then.
    """
    if trainer.adapter != LAUNCHED or _engine_kind(candidate, job.task, trainer) == SGLANG:
        return candidate, job.task
    return for_files(candidate, job)


def _engine_kind(
    candidate: Candidate,
    task: Task,
    trainer: Trainer,
) -> str | None:
    """Return the kind of the candidate's engine; None: it has none."""
    if not any(is_share(name) for name in candidate.settings):
        return None
    composition = trainer.compose(candidate, task)
    if composition.engine is not None:
        return composition.engine.kind
    return None if composition.split is None else composition.split.engine.kind


def _with_shares(settings: Settings, convert: Callable[[float], float]) -> dict[str, KnobValue]:
    converted: dict[str, KnobValue] = dict(settings)
    for name, share in shares_among(settings).items():
        converted[name] = convert(share)
    return converted


def shares_among(settings: Settings) -> dict[str, float]:
    """Return the engine shares of these settings, by name."""
    shares = {}
    for name, value in settings.items():
        if is_share(name) and is_number(value):
            shares[name] = float(value)
    return shares


# What a reader is told.


def limit_notes(job: Job, candidates: Iterable[Candidate]) -> Iterator[str]:
    """Yield what the shares of these candidates mean, where a limit gives them two meanings."""
    hardware = job.task.hardware
    scale = scale_of(hardware, job.memory_limit_bytes)
    if scale == 1.0:
        return
    examples: dict[str, float] = {}
    for candidate in candidates:
        examples = {**shares_among(candidate.settings), **examples}
    for name, share in examples.items():
        limit = format_bytes(job.memory_limit_bytes)
        gpu = format_bytes(hardware.memory_bytes)
        yield (
            f"{name} is a share of the limit of {limit} here, and of the whole GPU of {gpu} in"
            f" files and commands of the training: {share} is written as"
            f" {share_of_gpu(share, scale)}"
        )


def file_notes(
    stated: Settings,
    held_values: Settings,
    hardware: Hardware,
    limit_bytes: int,
) -> Iterator[str]:
    """Yield the shares that a user's file states, with what they are within the limit
    (`held_values`).
    """
    scale = scale_of(hardware, limit_bytes)
    if scale == 1.0:
        return
    limit = format_bytes(limit_bytes)
    within = shares_among(held_values)
    for name, share in shares_among(stated).items():
        if 1 >= share > scale:
            total = shared_bytes(hardware.memory_bytes, None, gpu_of(hardware))
            yield (
                f"your {name} of {share} takes {format_bytes(share * total)} of the GPU, above the"
                f" limit of {limit}"
            )
        elif name in within:
            yield (
                f"your {name} of {share} is a share of the whole GPU: of the limit of {limit} it"
                f" is {within[name]}"
            )

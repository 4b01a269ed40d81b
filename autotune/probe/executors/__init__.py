"""Executors: the machines and processes that run probes. Each passes the same contract test.

base.py          interfaces Executor and ProbeRunner; one thread per slot
local.py         this machine;  emulated.py  emulated GPUs on it
    local_places.py  GPUs and cores of its slots
ray.py           Ray cluster
    ray_cluster.py   its connection and slots
    ray_plan.py      division of the nodes into slots
    ray_node.py      part of a slot on a node;  merged_parts.py  its parts as one measurement
    head_watch.py    whether the cluster's head is lost
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.machine.environment import SUPPORTED

if TYPE_CHECKING:
    from autotune.core.job import Job
    from autotune.frameworks.base import Trainer
    from autotune.probe.executors.base import Executor
    from autotune.probe.worker_process import RunnerSettings


def open_executor(job: Job, trainer: Trainer) -> Executor:
    """Return an executor, not started yet; its `close` ends every process. BadInput where its
    slots do not fit.
    """
    # Imported here, because importing this package must stay fast.
    from autotune.frameworks.shares_in_files import for_probe
    from autotune.probe.executors.local import LocalExecutor
    from autotune.probe.executors.local_places import local_places
    from autotune.probe.runner import RequestBuilders

    task = job.task
    settings = runner_settings(job, trainer)
    requests = RequestBuilders(
        load=lambda candidate: trainer.load_request(candidate, task),
        probe=lambda candidate, plan: trainer.probe_request(
            *for_probe(candidate, job, trainer), plan
        ),
    )
    if job.executor == "ray":
        from autotune.probe.executors.ray import RayExecutor  # needs the extra `ray`

        return RayExecutor(
            settings,
            requests,
            hardware=task.hardware,
            address=job.address,
            slots=job.slots,
        )
    if job.mode == "emulate":
        from autotune.probe.executors.emulated import EmulatedExecutor

        return EmulatedExecutor(
            settings, requests, hardware=task.hardware, saves=task.workload.tuning != "full"
        )
    return LocalExecutor(
        settings, requests, places=local_places(task.hardware, job.memory_limit_bytes, job.slots)
    )


def runner_settings(job: Job, trainer: Trainer) -> RunnerSettings:
    """Return the start parameters of the job's workers."""
    from autotune.probe.worker_process import RunnerSettings

    task = job.task
    return RunnerSettings(
        python=task.workload.python,
        adapter=trainer.adapter,
        ranks=task.hardware.count,
        limit_bytes=job.memory_limit_bytes,
        device_kind=task.hardware.kind,
        devices=task.hardware.count,
        supported=SUPPORTED.get(trainer.name, {}),
    )

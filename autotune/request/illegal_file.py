"""Refusal of a user's file that its framework rejects."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from autotune.core.errors import CannotPredict, IllegalConfiguration
from autotune.core.job import Hardware, Job, Task
from autotune.frameworks.base import Trainer
from autotune.frameworks.script_gpus import ScriptGpus
from autotune.request.origins import HeldSettings, values_of


class IllegalFile(IllegalConfiguration):
    """Refusal of the user's file on these GPUs. `fewer_gpus`: those that it is made for."""

    def __init__(
        self,
        sentence: str,
        *,
        way_out: str,
        fewer_gpus: Hardware | None,
    ) -> None:
        super().__init__(sentence, way_out=way_out)
        self.fewer_gpus = fewer_gpus


def refuse_illegal_file(
    job: Job,
    trainer: Trainer,
    of_file: HeldSettings,
    of_script: tuple[str, ...],
    gpus_of_script: ScriptGpus | None,
) -> None:
    """Refuse a user's file that the framework rejects. Flags may repair the file, or depend on
    knobs that the search has yet to set: if the merged settings are illegal, only the file alone
    is judged, with the framework's defaults.
    """
    task = job.task
    if task.workload.config_file is None:
        return
    candidate = trainer.complete({}, task)
    reason = trainer.why_illegal(candidate, task)
    if reason is None:
        return
    workload = replace(task.workload, held_values=values_of(of_file))
    file_task = replace(task, workload=workload)
    with contextlib.suppress(CannotPredict):  # flags replace what is not modelled
        candidate = trainer.complete({}, file_task)
        reason = trainer.why_illegal(candidate, file_task)
    if reason is not None:
        differences = ""
        for line in of_script:
            setting, equals, _ = line.partition("=")
            if not equals or " " in setting or setting in reason:
                differences += f" {line}."
        way_out = "Correct it, or change it with --set, and run again."
        fewer_gpus = None
        if gpus_of_script is not None and gpus_of_script.count != task.hardware.count:
            gpus = replace(task.hardware, count=gpus_of_script.count)
            way_out = f"Give the GPUs that it is made for, --gpus {gpus}, or change it with --set."
            fewer_gpus = gpus if gpus.count < task.hardware.count else None
        elif "divisible" in reason:
            dividing = _gpus_that_divide(trainer, file_task)
            if dividing is not None:
                way_out = f"Give GPUs that divide it, --gpus {dividing}, or change it with --set."
        raise IllegalFile(
            f"{task.workload.config_file} can't be trained as it is: {reason}{differences}",
            way_out=way_out,
            fewer_gpus=fewer_gpus,
        )


def _gpus_that_divide(trainer: Trainer, task: Task) -> Hardware | None:
    """Return the most GPUs below these on which the configuration is legal."""
    workload = replace(task.workload, global_batch=None)  # it follows their number
    for count in range(task.hardware.count - 1, 0, -1):
        hardware = replace(task.hardware, count=count)
        smaller_task = replace(task, workload=workload, hardware=hardware)
        if trainer.why_illegal(trainer.complete({}, smaller_task), smaller_task) is None:
            return hardware
    return None

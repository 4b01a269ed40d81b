"""Executors on the GPU of this machine, for tests of the CUDA paths; models are synthetic, built
from their shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate, KnobValue
from autotune.machine.hardware_detection import gpus_here
from autotune.probe.executors import open_executor
from autotune.probe.executors.local import LocalExecutor
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest
from autotune.request.request_parser import parse_request

SHORT_PROBE = ProbePlan(
    optimizer_steps=2,
    warmup_cycles=1,
    timed_cycles=2,
)
WHOLE = ProbePlan(
    optimizer_steps=4,
    warmup_cycles=1,
    timed_cycles=3,
    save_checkpoint=True,
    evaluate=True,
)

ALWAYS = ("num_generations=4", "max_prompt_length=128", "max_completion_length=128")


def gpu_request(folder: Path, *holds: str, gpus: int = 1, **flags: object) -> ParsedRequest:
    """Return a request for Qwen2.5-0.5B on this many of this machine's GPUs; no download. Skips
    where there are fewer.
    """
    present = len(gpus_here())
    if present < gpus:
        pytest.skip(f"needs {gpus} NVIDIA GPUs, and this machine has {present}")
    # A knob is held once: a later value replaces the default.
    hold_by_name = {hold.partition("=")[0]: hold for hold in (*ALWAYS, *holds)}
    values = {
        "model": "Qwen2.5-0.5B",
        "gpus": f"{gpus}xlocal",
        "mode": "probe",
        "tuning": "lora",
        "global_batch": 16,
        **flags,
    }
    return parse_request(
        Flags(hold=tuple(hold_by_name.values()), out=str(folder / "out"), **values)
    )  # type: ignore[arg-type]


def candidate(request: ParsedRequest, **knobs: KnobValue) -> Candidate:
    """Return the framework's defaults with these knobs, at a constant global batch; it must be
    legal.
    """
    job, trainer = request.job, request.trainer
    base = dict(trainer.baseline(job.space, job.task))
    micro_batch = knobs.get("per_device_train_batch_size", 4)
    assert isinstance(micro_batch, int)
    total = job.task.workload.global_batch or micro_batch
    shape = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": total // micro_batch,
    }
    completed = trainer.complete({**base, **shape, **knobs}, job.task)
    assert trainer.why_illegal(completed, job.task) is None
    return completed


@contextmanager
def runner(request: ParsedRequest) -> Iterator[LocalExecutor]:
    executor = open_executor(request.job, request.trainer)
    try:
        yield executor
    finally:
        executor.close()


def measured(
    request: ParsedRequest, plan: ProbePlan = SHORT_PROBE, **knobs: KnobValue
) -> Measurement:
    """Measure one candidate with an executor of its own."""
    probed = candidate(request, **knobs)
    with runner(request) as executor:
        return executor.open(probed).measure(probed, plan)


def check_well(measurement: Measurement) -> None:
    """Check a good end, and that every figure of a GPU is present and plausible."""
    assert measurement.outcome == "ok", measurement.failure
    memory = measurement.memory
    assert memory.peak_bytes is not None and memory.torch_allocated_bytes is not None
    assert 0 < memory.torch_allocated_bytes <= memory.peak_bytes <= memory.limit_bytes
    assert memory.devices and memory.devices[0].peak_bytes == memory.peak_bytes
    assert measurement.worst is not None and measurement.worst.tokens_per_second > 0
    assert measurement.exercised is not None
    assert (
        measurement.exercised.longest_completion == measurement.exercised.shortest_completion == 128
    )

"""Real rigs on the GPU of this machine, for the tests of CUDA's paths; models are made up from their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.answering.opening import open_executor
from autotune.asking.flags import Flags
from autotune.asking.understanding import Understood, understand
from autotune.candidate import Candidate, KnobValue
from autotune.executors.local import LocalExecutor
from autotune.measurement import Measurement
from autotune.trainers.base import ProbePlan

SHORT = ProbePlan(optimizer_steps=2, warmup_cycles=1, timed_cycles=2)
WHOLE = ProbePlan(optimizer_steps=4, warmup_cycles=1, timed_cycles=3, save_checkpoint=True, evaluate=True)

ALWAYS = ("num_generations=4", "max_prompt_length=128", "max_completion_length=128")


def asked(folder: Path, *holds: str, **flags: object) -> Understood:
    """A question about Qwen2.5-0.5B on this machine's GPU; nothing of it is downloaded."""
    named = {"model": "Qwen2.5-0.5B", "gpus": "local", "mode": "probe", "tuning": "lora", "global_batch": 16, **flags}
    return understand(Flags(hold=(*ALWAYS, *holds), out=str(folder / "out"), **named))  # type: ignore[arg-type]


def candidate(understood: Understood, **knobs: KnobValue) -> Candidate:
    """The framework's defaults with these knobs, at a constant global batch; it must be legal."""
    question, trainer = understood.question, understood.trainer
    base = dict(trainer.baseline(question.space, question.job))
    micro_batch = knobs.get("per_device_train_batch_size", 4)
    assert isinstance(micro_batch, int)
    total = question.job.workload.global_batch or micro_batch
    shape = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": total // micro_batch}
    made = trainer.complete({**base, **shape, **knobs}, question.job)
    assert trainer.why_illegal(made, question.job) is None
    return made


@contextmanager
def rig(understood: Understood) -> Iterator[LocalExecutor]:
    executor = open_executor(understood.question, understood.trainer)
    try:
        yield executor
    finally:
        executor.close()


def measured(understood: Understood, plan: ProbePlan = SHORT, **knobs: KnobValue) -> Measurement:
    """One candidate on a rig of its own."""
    one = candidate(understood, **knobs)
    with rig(understood) as executor:
        return executor.open(one).measure(one, plan)


def check_well(found: Measurement) -> None:
    """It ended well, and every figure that a GPU must give is there and within reason."""
    assert found.outcome == "ok", found.failure
    memory = found.memory
    assert memory.peak_bytes is not None and memory.torch_allocated_bytes is not None
    assert 0 < memory.torch_allocated_bytes <= memory.peak_bytes <= memory.limit_bytes
    assert memory.devices and memory.devices[0].peak_bytes == memory.peak_bytes
    assert found.worst is not None and found.worst.tokens_per_second > 0
    assert found.exercised is not None
    assert found.exercised.longest_completion == found.exercised.shortest_completion == 128

"""Ladders of micro-batches on the product's own probe runners, with the predicted figures next
to the measured ones.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from gpu_record import Record, measured_row, predicted_figures, refused_row, unstarted_row
from gpu_setups import Ladder, Setup

from autotune.core.errors import AutotuneError, CannotPredict
from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate, fingerprint
from autotune.prediction.service import predict_candidates
from autotune.probe.executors import open_executor
from autotune.probe.executors.base import Executor
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest
from autotune.request.request_parser import parse_request

POINT = ProbePlan(
    optimizer_steps=2,
    warmup_cycles=1,
    timed_cycles=2,
    reuse_rollouts=True,
)


class Box:
    """A time box: nothing is started after its end, and what runs is ended by its deadline."""

    def __init__(self, minutes: float) -> None:
        self._until = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        return self._until - time.monotonic()


def job_of(setup: Setup, gpus: str, **changes: object) -> ParsedRequest:
    """Return the setup as a request of `autotune run`."""
    flags = Flags(
        model=setup.model,
        gpus=gpus,
        tuning=setup.tuning,
        memory_limit=setup.limit,
        global_batch=setup.global_batch,
        hold=(f"num_generations={setup.generations}", *setup.holds),
        mode="probe",
        out=str(Path(tempfile.gettempdir()) / "bench-gpu"),
    )
    return parse_request(Flags(**{**vars(flags), **changes}))


def rungs_of(
    setup: Setup,
    ladder: Ladder,
    understood: ParsedRequest,
) -> list[Candidate]:
    """The ladder's candidates, the smallest micro-batch first, at a constant generation batch."""
    trainer, job = understood.trainer, understood.job
    base = dict(trainer.baseline(job.space, job.task))
    candidates = []
    for micro_batch in ladder.micro_batches:
        knobs = {
            **base,
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": (
                setup.global_batch // micro_batch // job.task.hardware.count
            ),
            "gradient_checkpointing": ladder.checkpointing,
            "max_prompt_length": ladder.prompt,
            "max_completion_length": ladder.completion,
        }
        candidates.append(trainer.complete(knobs, job.task))
    return candidates


def measure_setups(
    setups: Sequence[Setup],
    gpus: str,
    record: Record,
    box: Box,
) -> None:
    """Measure every setup's ladders, one runner after the other, until the time limit."""
    for setup in setups:
        if box.left <= 0:
            return
        understood = built(setup, gpus, record)
        if understood is None:
            continue
        with closing(open_executor(understood.job, understood.trainer)) as executor:
            for ladder in setup.ladders:
                _climb(setup, ladder, understood, executor, record, box)
        predict(setup, understood, record)


def built(
    setup: Setup,
    gpus: str,
    record: Record,
    **changes: object,
) -> ParsedRequest | None:
    """Return the setup's request; None, and a row with the reason, where there can be none."""
    key = fingerprint({"setup": setup.name})
    try:
        understood = job_of(setup, gpus, **changes)
    except AutotuneError as error:
        print(f"{setup.name}: {error}", file=sys.stderr, flush=True)
        record.add(unstarted_row(key, setup.name, str(error)))
        return None
    record.discard(key)  # what was missing at an earlier start is there now
    return understood


def _climb(
    setup: Setup,
    ladder: Ladder,
    understood: ParsedRequest,
    executor: Executor,
    record: Record,
    box: Box,
) -> None:
    """Measure from the safe end up to the first point that does not fit."""
    for candidate in rungs_of(setup, ladder, understood):
        key = key_of(setup, candidate)
        row = record.row(key)
        if row is None:
            if box.left <= 0:
                return
            row = _point(key, setup, candidate, understood, executor, record, box)
        if row is not None and str(row["outcome"]).startswith("oom_"):
            return


def key_of(setup: Setup, candidate: Candidate) -> str:
    return fingerprint({"setup": setup.name, "candidate": candidate.id})


def _point(
    key: str,
    setup: Setup,
    candidate: Candidate,
    understood: ParsedRequest,
    executor: Executor,
    record: Record,
    box: Box,
) -> dict[str, object] | None:
    reason = understood.trainer.why_illegal(candidate, understood.job.task)
    if reason is not None:
        record.add(refused_row(key, setup.name, candidate, reason))
        return record.row(key)
    try:
        measurement = measure(executor, candidate, box)
    except AutotuneError as error:
        record.add(unstarted_row(key, setup.name, str(error), candidate.knobs))
        return record.row(key)
    if measurement is None:
        return None
    record.add(measured_row(key, setup.name, candidate, measurement), measurement.versions)
    _say(setup, candidate, measurement)
    return record.row(key)


def measure(
    executor: Executor,
    candidate: Candidate,
    box: Box,
    plan: ProbePlan = POINT,
) -> Measurement | None:
    """Measure one probe; None where the time limit, not the candidate, ended it."""
    from dataclasses import replace

    bound = replace(plan, deadline_seconds=max(1.0, min(plan.deadline_seconds, box.left)))
    measurement = executor.open(candidate).measure(candidate, bound)
    ended_by_the_box = (
        measurement.outcome == "timeout" and bound.deadline_seconds < plan.deadline_seconds
    )
    return None if ended_by_the_box else measurement


def _say(
    setup: Setup,
    candidate: Candidate,
    measurement: Measurement,
) -> None:
    names = ("per_device_train_batch_size", "gradient_checkpointing", "max_completion_length")
    knob_values = " ".join(f"{name}={candidate.knobs.get(name)}" for name in names)
    peak = measurement.memory.peak_bytes or 0
    speed = f"{measurement.worst.tokens_per_second:.0f} tokens/s" if measurement.worst else "-"
    print(
        f"{setup.name}: {knob_values}: {measurement.outcome}, {peak / 2**30:.2f} GiB, {speed},"
        f" {measurement.cost.total_seconds:.1f} s",
        file=sys.stderr,
        flush=True,
    )


def predict(
    setup: Setup,
    understood: ParsedRequest,
    record: Record,
) -> None:
    """The predicted figures of every measured point of this setup; where there are none, why
    not.
    """
    candidates = {}
    for candidate in _all_rungs(setup, understood):
        candidates[key_of(setup, candidate)] = candidate
    unpredicted = {}
    for key, candidate in candidates.items():
        if _lacks_prediction(record, key):
            unpredicted[key] = candidate
    if not unpredicted:
        return
    why = "a CPU's limit binds the whole process tree, of which a trace knows one part"
    foreseen = {}
    if understood.job.task.hardware.kind == "cuda":
        try:
            foreseen = dict(
                predict_candidates(understood.job, understood.trainer, list(unpredicted.values()))
            )
            why = "its step could not be followed"
        except CannotPredict as error:
            why = str(error)
    for key, candidate in unpredicted.items():
        row = record.row(key)
        assert row is not None
        prediction = foreseen.get(candidate.id)
        predicted = predicted_figures(prediction) if prediction else None
        record.add({**row, "predicted": predicted, "predicted_why_not": None if predicted else why})


def _lacks_prediction(record: Record, key: str) -> bool:
    row = record.row(key)
    return row is not None and row["predicted"] is None and row["outcome"] != "illegal"


def _all_rungs(setup: Setup, understood: ParsedRequest) -> Iterator[Candidate]:
    for ladder in setup.ladders:
        yield from rungs_of(setup, ladder, understood)

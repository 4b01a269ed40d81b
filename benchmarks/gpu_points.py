"""Points of `make first-light` on the product's own probe runners, or predicted where no GPU is.

python benchmarks/gpu_points.py measure sft --out DIR --seconds 120
python benchmarks/gpu_points.py predict sft colocated --gpus H100 --out DIR
python benchmarks/gpu_points.py tiny --out DIR --seconds 120
    the same code on a CPU, with a synthetic model

`measure` appends to DIR/results.jsonl and leaves out the points that are there. `predict` writes
DIR/predicted.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_record import (
    DONE,
    FAILED,
    FILE,
    OUT_OF_TIME,
    Line,
    Record,
    basis_here,
    measured_row,
    predicted_figures,
    refused_row,
    unstarted_row,
)
from gpu_setups import PARTS, Point, Setup, tiny

from autotune.core.dataset import TokenLengths
from autotune.core.errors import AutotuneError
from autotune.core.job import Job
from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate, fingerprint
from autotune.core.units import GIB
from autotune.machine.hardware_detection import hardware
from autotune.prediction.service import predict_candidates
from autotune.probe.executors import open_executor
from autotune.probe.executors.base import Executor
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest
from autotune.request.request_parser import parse_request

PREDICTED = "predicted.json"
POINT = ProbePlan(
    optimizer_steps=2,
    warmup_cycles=1,
    timed_cycles=2,
    reuse_rollouts=True,
    deadline_seconds=200,
)
LONGEST = 1 << 30
"""Longer than any prompt: cut to a setup's own limit."""

REPEATED = ("crash", "timeout", "interrupted")
"""Outcomes after which a later program measures a point again."""

EMULATED_POINT = replace(POINT, timed_cycles=1, deadline_seconds=900)
"""Emulated steps have no speed: one cycle less, and time for a machine that computes the rest."""

SYNTHETIC = Path(__file__).resolve().parents[1] / "autotune" / "worker" / "synthetic.py"
TINY_SHAPE = ("--hidden", "128", "--intermediate", "768", "--layers", "2", "--vocab", "1024")


class Box:
    """A time box: nothing is started after its end, and what runs is ended by its deadline."""

    def __init__(self, minutes: float) -> None:
        self._until = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        return self._until - time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """A setup's points on one kind of device."""

    setup: Setup
    request: ParsedRequest
    plan: ProbePlan

    def candidate(self, point: Point) -> Candidate:
        trainer, job = self.request.trainer, self.request.job
        knobs = {
            **trainer.baseline(job.space, job.task),
            "per_device_train_batch_size": point.micro_batch,
            "gradient_accumulation_steps": self.setup.global_batch // point.micro_batch,
            "gradient_checkpointing": point.checkpointing,
        }
        if self.setup.method == "sft":
            knobs["max_length"] = point.prompt
        else:
            knobs["max_prompt_length"] = point.prompt
            knobs["max_completion_length"] = point.completion
        return trainer.complete(knobs, job.task)

    def refusal(self, candidate: Candidate) -> str | None:
        return self.request.trainer.why_illegal(candidate, self.request.job.task)


def job_of(
    setup: Setup,
    gpus: str,
    mode: str = "probe",
) -> ParsedRequest:
    """Return the setup as a request of `autotune run`. A limit above the card is none."""
    limit = None
    card_bytes = hardware(gpus).memory_bytes
    if setup.limit_gib is not None and setup.limit_gib * GIB < card_bytes:
        limit = f"{setup.limit_gib}G"
    flags = Flags(
        model=setup.model,
        gpus=gpus,
        method=setup.method,
        tuning=setup.tuning,
        memory_limit=limit,
        global_batch=setup.global_batch,
        hold=setup.holds,
        mode=mode,
        out=str(Path(tempfile.gettempdir()) / "first-light-points"),
    )
    return parse_request(flags)


def ladder_of(
    setup: Setup,
    gpus: str,
    mode: str = "probe",
) -> Ladder:
    plan = EMULATED_POINT if basis_here() == "emulated" else POINT
    return Ladder(
        setup=setup,
        request=job_of(setup, gpus, mode),
        plan=plan,
    )


def key_of(setup: Setup, candidate: Candidate) -> str:
    return fingerprint({"setup": setup.name, "candidate": candidate.id})


def _setup_key(setup: Setup) -> str:
    return fingerprint({"setup": setup.name})


def measure_setups(
    setups: Sequence[Setup],
    gpus: str,
    record: Record,
    box: Box,
) -> int:
    """Measure every setup's points. Return an exit code."""
    code = DONE
    for setup in setups:
        if box.left <= 5:
            print(f"{setup.name}: no time", flush=True)
            return OUT_OF_TIME
        began = time.monotonic()
        try:
            if not _climb(ladder_of(setup, gpus), record, box):
                return OUT_OF_TIME
        except AutotuneError as error:
            print(f"{setup.name}: {error}", flush=True)
            record.add(unstarted_row(_setup_key(setup), setup.name, str(error)))
            code = FAILED
        print(f"{setup.name}: {time.monotonic() - began:.0f} s with loading", flush=True)
    return code


def _climb(
    ladder: Ladder,
    record: Record,
    box: Box,
) -> bool:
    """Measure from the safe end. An out-of-memory error ends its choice of checkpointing."""
    exhausted = set()
    request = ladder.request
    with closing(open_executor(request.job, request.trainer)) as executor:
        for point in ladder.setup.points:
            row = _row(ladder, point, record)
            if row is None and point.checkpointing not in exhausted:
                row = _point(ladder, point, executor, record, box)
                if row is None:
                    print(f"{ladder.setup.name}, {point.name}: the time ended", flush=True)
                    return False
            if row is not None and row["outcome"].startswith("oom_"):
                exhausted.add(point.checkpointing)
    return True


def _row(
    ladder: Ladder,
    point: Point,
    record: Record,
) -> Line | None:
    """Return the point's line, unless its run says nothing about it."""
    row = record.row(key_of(ladder.setup, ladder.candidate(point)))
    return None if row is None or row["outcome"] in REPEATED else row


def _point(
    ladder: Ladder,
    point: Point,
    executor: Executor,
    record: Record,
    box: Box,
) -> Line | None:
    """Measure a point. Return its line, or None where the time ended."""
    setup, candidate = ladder.setup, ladder.candidate(point)
    key = key_of(setup, candidate)
    reason = ladder.refusal(candidate)
    if reason is not None:
        row = refused_row(key, setup.name, candidate, reason)
        record.add({**row, "point": point.name})
        return row
    if box.left <= 2:
        return None
    measurement = measure(executor, candidate, box, ladder.plan)
    if measurement is None:
        return None
    row = measured_row(key, setup.name, candidate, measurement)
    record.add({**row, "point": point.name}, measurement.versions)
    print(f"{setup.name}, {point.name}: {_figures(row)}", flush=True)
    return row


def measure(
    executor: Executor,
    candidate: Candidate,
    box: Box,
    plan: ProbePlan = POINT,
) -> Measurement | None:
    """Measure one probe; None where the time limit, not the candidate, ended it."""
    seconds = max(1.0, min(plan.deadline_seconds, box.left))
    bound = replace(plan, deadline_seconds=seconds)
    measurement = executor.open(candidate).measure(candidate, bound)
    if measurement.outcome == "timeout" and seconds < plan.deadline_seconds:
        return None
    return measurement


def _figures(row: Line) -> str:
    texts = []
    for name in ("torch_allocated_bytes", "torch_reserved_bytes", "peak_bytes"):
        value = row[name]
        texts.append("-" if value is None else f"{value / GIB:.2f}")
    figures = f"{basis_here()} {' / '.join(texts)} GiB allocated / reserved / device"
    return f"{row['outcome']}, {figures}, {row['seconds']:.0f} s"


def predict_setups(
    setups: Sequence[Setup],
    gpus: str,
    path: Path,
) -> None:
    """Write the predicted figures of all points by key; where there are none, the reason."""
    lines: dict[str, Line] = {}
    if path.exists():
        lines.update(json.loads(path.read_text()))
    path.parent.mkdir(parents=True, exist_ok=True)
    for setup in setups:
        try:
            lines.update(_predicted(ladder_of(setup, gpus, mode="predict")))
            print(f"{setup.name}: predicted", flush=True)
        except AutotuneError as error:
            lines[_setup_key(setup)] = {"setup": setup.name, "why": str(error)}
            print(f"{setup.name}: {error}", flush=True)
        path.write_text(json.dumps(lines, indent=1) + "\n")


def with_equal_prompts(job: Job) -> Job:
    """Return the job with what is true of a probe: its prompts all have the longest length."""
    lengths = TokenLengths.of("a probe's", [LONGEST])
    workload = replace(job.task.workload, prompt_lengths=lengths)
    return replace(job, task=replace(job.task, workload=workload))


def _predicted(ladder: Ladder) -> dict[str, Line]:
    setup, request = ladder.setup, ladder.request
    candidates = {point: ladder.candidate(point) for point in setup.points}
    legal = []
    for candidate in candidates.values():
        if ladder.refusal(candidate) is None:
            legal.append(candidate)
    predictions = predict_candidates(with_equal_prompts(request.job), request.trainer, legal)
    lines: dict[str, Line] = {}
    for point, candidate in candidates.items():
        line: Line = {"setup": setup.name, "point": point.name}
        prediction = predictions.get(candidate.id)
        if prediction is None:
            line["why"] = ladder.refusal(candidate) or "its step could not be followed"
        else:
            line.update(predicted_figures(prediction))
            line["engine_share"] = candidate.knobs.get("vllm_gpu_memory_utilization")
        lines[key_of(setup, candidate)] = line
    return lines


def synthetic_model(folder: Path) -> str:
    subprocess.run(
        [sys.executable, SYNTHETIC, str(folder / "model"), *TINY_SHAPE],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return str(folder / "model")


def main() -> int:
    arguments = _arguments()
    record = Record(arguments.out / FILE)
    box = Box(arguments.seconds / 60)
    if arguments.what == "tiny":
        with tempfile.TemporaryDirectory(prefix="first-light-") as folder:
            tiny_setups = tiny(synthetic_model(Path(folder)))
            return measure_setups(tiny_setups, "cpu", record, box)
    setups: list[Setup] = []
    for part in arguments.parts:
        setups += PARTS[part]
    if arguments.what == "measure":
        return measure_setups(setups, arguments.gpus, record, box)
    predict_setups(setups, arguments.gpus, arguments.out / PREDICTED)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["measure", "predict", "tiny"])
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--gpus", default="local")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Manual search, for comparison with `autotune run` in `make first-light`.

Everything stays at the framework's defaults, and the micro-batch is doubled from 1 until it runs
out of memory. The largest that fits is measured once more by the longer probe of a confirmation.

python benchmarks/gpu_by_hand.py --out DIR --seconds 240    # appends one line to DIR/results.jsonl
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from first_light_steps import SEARCH_GLOBAL_BATCH, SEARCH_HOLDS, SEARCH_LIMIT_GIB
from gpu_points import Box, job_of, measure
from gpu_record import FILE, Line, Record
from gpu_setups import Setup

from autotune.core.measurement import Measurement
from autotune.core.space import Candidate
from autotune.probe.executors import open_executor
from autotune.probe.executors.base import Executor
from autotune.request.job_builder import ParsedRequest
from autotune.search.loop import LONG_PROBE, SHORT_PROBE

JOB = Setup(
    method="grpo",
    model="Qwen2.5-7B",
    tuning="lora",
    limit_gib=SEARCH_LIMIT_GIB,
    points=(),
    holds=SEARCH_HOLDS,
    global_batch=SEARCH_GLOBAL_BATCH,
)


def by_hand(request: ParsedRequest, box: Box) -> Line:
    """Return what doubling the micro-batch finds, and what it costs."""
    seconds = 0.0
    tried: list[Line] = []
    best: Candidate | None = None
    longer: Measurement | None = None
    with closing(open_executor(request.job, request.trainer)) as executor:
        for candidate in doubled(request):
            measurement = measure(executor, candidate, box, SHORT_PROBE)
            if measurement is None:
                break
            seconds += measurement.cost.total_seconds
            tried.append(_tried(candidate, measurement))
            if measurement.outcome != "ok":
                break
            best = candidate
        if best is not None:
            longer = _longer(executor, best, box)
    if longer is not None:
        seconds += longer.cost.total_seconds
    speed = longer.worst.tokens_per_second if longer and longer.worst else None
    return {
        "tried": tried,
        "knobs": dict(best.knobs) if best else None,
        "tokens_per_second": speed,
        "peak_memory_bytes": longer.memory.peak_bytes if longer else None,
        "device_seconds": round(seconds, 1),
    }


def _longer(
    executor: Executor,
    best: Candidate,
    box: Box,
) -> Measurement | None:
    return measure(executor, best, box, LONG_PROBE) if box.left > 0 else None


def _tried(candidate: Candidate, measurement: Measurement) -> Line:
    micro_batch = candidate.knobs["per_device_train_batch_size"]
    return {"micro_batch": micro_batch, "outcome": str(measurement.outcome)}


def doubled(request: ParsedRequest) -> list[Candidate]:
    """Return the framework's defaults with micro-batches of 1, 2, 4 ..., at the same global batch;
    those that it refuses left out.
    """
    trainer, job = request.trainer, request.job
    base: dict[str, Any] = dict(trainer.baseline(job.space, job.task))
    candidates = []
    micro_batch = 1
    while micro_batch <= SEARCH_GLOBAL_BATCH:
        base["per_device_train_batch_size"] = micro_batch
        base["gradient_accumulation_steps"] = SEARCH_GLOBAL_BATCH // micro_batch
        candidate = trainer.complete(base, job.task)
        if trainer.why_illegal(candidate, job.task) is None:
            candidates.append(candidate)
        micro_batch *= 2
    return candidates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    answer = by_hand(job_of(JOB, "local"), Box(arguments.seconds / 60))
    print(answer, flush=True)
    record = Record(arguments.out / FILE)
    record.append("search", name="by hand", answer=answer)
    return 0 if answer["tried"] else 1


if __name__ == "__main__":
    sys.exit(main())

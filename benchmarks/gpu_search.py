"""Search on a real job: `autotune run`, compared with the framework's defaults and with a manual
search.

Manual search: everything at the framework's defaults, and the micro-batch doubled from 1 until it
runs out of memory; the largest that fits is taken. Both results are measured once more by the same
longer probe.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from typing import Any

from gpu_points import Box, job_of, key_of, measure
from gpu_record import Record, measured_row
from gpu_setups import GLOBAL_BATCH, HALF, Setup

from autotune.core.space import Candidate
from autotune.probe.executors import open_executor
from autotune.request.job_builder import ParsedRequest
from autotune.search.loop import LONG_PROBE, SHORT_PROBE

QUESTION = Setup(
    model="Qwen2.5-7B",
    tuning="lora",
    limit=HALF,
    ladders=(),
    holds=(),
)
LENGTHS = ("max_prompt_length=512", "max_completion_length=1024")
RUN = "autotune run"
SHARE = 0.6
"""Share of the time limit for the search; the rest is for the manual search."""


def tiny_job(model: str) -> Setup:
    return Setup(
        model=model,
        tuning="full",
        limit="1G",
        ladders=(),
        global_batch=16,
        holds=("use_vllm=false",),
        generations=8,
    )


def run_search(
    setup: Setup,
    gpus: str,
    record: Record,
    box: Box,
    *,
    space: str | None,
    lengths: tuple[str, ...],
) -> None:
    """Run the search by its command, then the manual search, each once."""
    if record.found(RUN) is None:
        record.find(RUN, _run(setup, gpus, box, space, lengths))
    if record.found("by hand") is None and box.left > 0:
        record.find("by hand", _by_hand(setup, gpus, record, box, lengths))
    if record.found("by hand") and record.found(RUN):
        record.find("compared", _compared(record.found(RUN), record.found("by hand")))


def _run(
    setup: Setup,
    gpus: str,
    box: Box,
    space: str | None,
    lengths: tuple[str, ...],
) -> dict[str, Any]:
    """Return the JSON answer with its command line."""
    seconds = max(1, int(box.left * SHARE))
    folder = f"{job_of(setup, gpus).job.out}-run"
    typed = [
        "run",
        "--model",
        setup.model,
        "--gpus",
        gpus,
        "--tuning",
        setup.tuning,
        "--memory-limit",
        setup.limit,
    ]
    typed += [
        "--global-batch",
        str(setup.global_batch),
        "--budget",
        f"{seconds}s",
        "--mode",
        "probe",
        "--fresh",
        "--json",
    ]
    for hold in (*setup.holds, *lengths):
        typed.extend(("--hold", hold))
    typed += ["--space", space] if space else []
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *typed, "--out", folder],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    answer: dict[str, Any] = (
        json.loads(done.stdout) if done.stdout.strip() else {"status": "no answer"}
    )
    return {"typed": "autotune " + " ".join(typed), "exit": done.returncode, **answer}


def _by_hand(
    setup: Setup,
    gpus: str,
    record: Record,
    box: Box,
    lengths: tuple[str, ...],
) -> dict[str, Any]:
    """Doubling until it no longer fits."""
    holds = tuple(
        hold
        for hold in setup.holds
        if not hold.startswith(("max_prompt_length", "max_completion_length"))
    )
    understood = job_of(
        setup, gpus, hold=(f"num_generations={setup.generations}", *holds, *lengths)
    )
    tried: list[dict[str, Any]] = []
    best: Candidate | None = None
    seconds = 0.0
    with closing(open_executor(understood.job, understood.trainer)) as executor:
        for candidate in _doubled(setup, understood):
            measurement = measure(executor, candidate, box, SHORT_PROBE)
            if measurement is None:
                break
            seconds += measurement.cost.total_seconds
            key = key_of(setup, candidate)
            record.add(measured_row(key, "by hand", candidate, measurement), measurement.versions)
            tried.append({"key": key, "outcome": str(measurement.outcome)})
            if measurement.outcome != "ok":
                break
            best = candidate
        longer = measure(executor, best, box, LONG_PROBE) if best else None
    if longer is not None and best is not None:
        seconds += longer.cost.total_seconds
        record.add(
            measured_row(f"{key_of(setup, best)}-long", "by hand, longer", best, longer),
            longer.versions,
        )
    return {
        "probes": len(tried),
        "tried": tried,
        "knobs": dict(best.knobs) if best else None,
        "tokens_per_second": (
            round(longer.worst.tokens_per_second, 2) if longer and longer.worst else None
        ),
        "peak_memory_bytes": longer.memory.peak_bytes if longer else None,
        "device_seconds": round(seconds, 1),
    }


def _doubled(setup: Setup, understood: ParsedRequest) -> list[Candidate]:
    """The framework's defaults with micro-batches of 1, 2, 4 ..., at the same global batch;
    those that it refuses left out.
    """
    trainer, job = understood.trainer, understood.job
    base = dict(trainer.baseline(job.space, job.task))
    total = (setup.global_batch or GLOBAL_BATCH) // job.task.hardware.count
    candidates, micro_batch = [], 1
    while micro_batch <= total:
        knobs = {
            **base,
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": total // micro_batch,
        }
        candidate = trainer.complete(knobs, job.task)
        if trainer.why_illegal(candidate, job.task) is None:
            candidates.append(candidate)
        micro_batch *= 2
    return candidates


def _compared(answer: dict[str, Any], by_hand: dict[str, Any]) -> dict[str, Any]:
    """Speed of the recommendation over the framework's defaults' and over the best by hand; None
    where one has none.
    """
    recommended = answer.get("recommendation") or {}
    speed = (recommended.get("tokens_per_second") or {}).get("worst")
    baseline = (answer.get("baseline") or {}).get("tokens_per_second")
    return {
        "over_defaults": _ratio(speed, baseline),
        "over_by_hand": _ratio(speed, by_hand.get("tokens_per_second")),
        "gpu_minutes": round((answer.get("probe_seconds") or 0) / 60, 2),
        "gpu_minutes_by_hand": round(by_hand["device_seconds"] / 60, 2),
        "probes": (answer.get("counts") or {}).get("probed"),
        "probes_by_hand": by_hand["probes"],
    }


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return round(numerator / denominator, 4) if numerator and denominator else None

"""Predictions from step models, compared with those from a trace of each candidate's own step.

    make bench-step-models

Points are drawn at random in each family: micro-batch, prompt and completion. No GPU, no weights,
no network. A row is printed as it is made, and results/step_models.json is written at the end, with
the exceptions to the bars in `BARS`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import machine

from autotune.core.files import write_atomically
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import Candidate, KnobValue
from autotune.prediction.opening import open_tracers
from autotune.prediction.service import PredictionService, open_prediction_service
from autotune.request.flags import flags_of
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import read_sources

RESULTS = Path(__file__).resolve().parent / "results" / "step_models.json"
SEED = 11

BARS = {"allocated": 0.0005, "device": 0.003, "speed": 0.02}
"""Largest relative differences; verdicts have to be equal."""

Family = tuple[str, str, Mapping[str, str], Mapping[str, KnobValue]]

FAMILIES: Sequence[Family] = (
    ("Qwen2.5-1.5B", "A100-40G", {"tuning": "lora"}, {"use_vllm": True}),
    ("Qwen2.5-7B", "2xA100-40G", {"tuning": "lora"}, {}),
    ("Qwen2.5-7B", "2xA100-40G", {"tuning": "lora"}, {"sharding": "zero3"}),
    ("Qwen3-0.6B", "A100-40G", {"tuning": "lora"}, {"gradient_checkpointing": False}),
    ("Llama-3.1-8B", "2xA100-80G", {"tuning": "lora"}, {"gradient_checkpointing": False}),
    ("Qwen2.5-0.5B", "A100-40G", {"tuning": "full"}, {}),
    ("Qwen2.5-1.5B", "A100-40G", {"tuning": "lora", "method": "sft"}, {}),
)


def drawn_points(
    request: ParsedRequest,
    change: Mapping[str, KnobValue],
    count: int,
    draw: random.Random,
) -> Iterator[Candidate]:
    """Yield legal candidates of one family at random points."""
    task, trainer = request.job.task, request.trainer
    base = candidate_of_job(request)
    batch = base.settings["per_device_train_batch_size"]
    steps = base.settings["gradient_accumulation_steps"]
    assert isinstance(batch, int) and isinstance(steps, int)
    while count:
        size = draw.choice([number for number in range(1, 33) if batch * steps % number == 0])
        knobs: dict[str, Any] = {
            **base.knobs,
            **change,
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": batch * steps // size,
        }
        for name in ("max_completion_length", "max_prompt_length", "max_length"):
            if name in knobs:
                knobs[name] = 8 * draw.randint(8, 384)
        candidate = trainer.complete(request.whole_space.with_remedies(knobs), task)
        if trainer.why_illegal(candidate, task) is None:
            count -= 1
            yield candidate


def compared(candidate: Candidate, modelled: Prediction, traced: Prediction) -> dict[str, Any]:
    """Return relative differences, and both verdicts."""
    return {
        "knobs": dict(candidate.knobs),
        "allocated": difference(
            modelled.torch_peak_allocated_bytes, traced.torch_peak_allocated_bytes
        ),
        "device": difference(modelled.peak_memory_bytes, traced.peak_memory_bytes),
        "speed": difference(modelled.ranking_rate, traced.ranking_rate),
        "device_bytes": round(traced.peak_memory_bytes.value),
        "fits": [modelled.fits, traced.fits],
        "versions": dict(traced.versions),
    }


def difference(modelled: Estimate | None, traced: Estimate | None) -> float:
    if modelled is None or traced is None:
        return 0.0 if modelled is traced else 1.0
    return modelled.value / traced.value - 1


def is_exception(row: Mapping[str, Any]) -> bool:
    modelled, traced = row["fits"]
    return modelled != traced or any(abs(row[name]) > bar for name, bar in BARS.items())


def rows_of(family: Family, points: int, draw: random.Random) -> Iterator[dict[str, Any]]:
    """Yield a row for each point of a family."""
    model, gpus, flags, change = family
    sources = read_sources(flags_of({"model": model, "gpus": gpus, **flags}), mode="predict")
    request = sources.parse(limit_prompts=True)
    job, trainer = request.job, request.trainer
    tracing = PredictionService(
        task=job.task,
        trainer=trainer,
        limit_bytes=job.memory_limit_bytes,
        tracer=open_tracers(job.task, trainer),
    )
    modelling = open_prediction_service(job, trainer)
    with contextlib.closing(tracing), contextlib.closing(modelling):
        for candidate in drawn_points(request, change, points, draw):
            began = time.process_time()
            modelled = modelling.predict(candidate)
            seconds = time.process_time() - began
            row = compared(candidate, modelled, tracing.predict(candidate))
            label = {"model": model, "gpus": gpus, **flags, **change}
            yield {"family": label, **row, "cpu_seconds": round(seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=6, help="of each family")
    parser.add_argument("--families", type=int, nargs="*", default=range(len(FAMILIES)))
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    for number in options.families:
        for row in rows_of(FAMILIES[number], options.points, draw):
            rows.append(row)
            mark = "EXCEPTION" if is_exception(row) else "equal"
            print(f"{mark}: {json.dumps(row)}", flush=True)

    exceptions = [row for row in rows if is_exception(row)]
    largest = {name: max(abs(row[name]) for row in rows) for name in BARS}
    document = {
        "bars": BARS,
        "seed": options.seed,
        "points": len(rows),
        "largest": largest,
        "exceptions": exceptions,
        "rows": rows,
        "machine": machine.facts(rows[0]["versions"]),
    }
    write_atomically(RESULTS, f"{json.dumps(document, indent=1)}\n".encode())
    print(f"{len(rows)} points, {len(exceptions)} exceptions, largest differences {largest}")


if __name__ == "__main__":
    main()

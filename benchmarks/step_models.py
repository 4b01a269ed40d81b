"""Predictions from step models, compared with those from a trace of each candidate's own step.

    make bench-step-models

Points are drawn at random in each family: micro-batch, prompt and completion. No GPU, no weights,
no network. A row is printed and written to results/step_models.json as it is made, and a call goes
on where the last one ended; the file has the exceptions to the bars in `BARS`.

Exceptions in SFT: the rows of all micro-batches are collated at the end of loading, so the number
of allocations in that block depends on the point, and its bytes are scaled by part: the weights
with them, by 0.1 % or less of the peak. The reuse of cached blocks then differs by up to 0.4 %.

Exception with vLLM (1.5B, 8 rows of 5,216 tokens): loops of the scoring pass allocate 5,749 times
in the trace, 5,469 times in the model, which has the iterations of its first point. Allocated bytes
are equal; torch's cache keeps 722 MiB more in the model, 2.9 %.
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

LORA, FULL = {"tuning": "lora"}, {"tuning": "full"}
SFT, DPO = {"method": "sft"}, {"method": "dpo"}
VLLM, KEPT = {"use_vllm": True}, {"gradient_checkpointing": False}
ZERO2, ZERO3 = {"sharding": "zero2"}, {"sharding": "zero3"}

FAMILIES: Sequence[Family] = (
    ("Qwen2.5-0.5B", "A100-40G", LORA, {}),
    ("Qwen2.5-0.5B", "A100-40G", LORA, VLLM),
    ("Qwen2.5-0.5B", "2xH100", LORA, ZERO3),
    ("Qwen2.5-0.5B", "2xA100-40G", LORA, ZERO2),
    ("Qwen2.5-0.5B", "A100-40G", FULL, {}),
    ("Qwen2.5-0.5B", "2xA100-40G", FULL, ZERO2),
    ("Qwen2.5-0.5B", "4xA100-40G", FULL, {**ZERO3, **VLLM}),
    ("Qwen2.5-0.5B", "A100-40G", {**LORA, **SFT}, {}),
    ("Qwen2.5-0.5B", "A100-40G", {**LORA, **DPO}, KEPT),
    ("Qwen2.5-0.5B", "A100-40G", LORA, {"load_in_4bit": True}),
    ("Llama-3.2-1B", "A100-40G", LORA, {}),
    ("Llama-3.2-1B", "H100", LORA, {**VLLM, **KEPT}),
    ("Llama-3.2-1B", "2xA100-40G", FULL, VLLM),
    ("Llama-3.2-1B", "2xH100", LORA, ZERO3),
    ("Qwen3-0.6B", "A100-40G", LORA, KEPT),
    ("Qwen3-0.6B", "2xH100", LORA, VLLM),
    ("Qwen2.5-1.5B", "A100-40G", LORA, VLLM),
    ("Qwen2.5-1.5B", "A100-40G", {**LORA, **SFT}, {}),
    ("Qwen2.5-7B", "2xA100-40G", LORA, {}),
    ("Qwen2.5-7B", "2xA100-40G", LORA, ZERO3),
    ("Llama-3.1-8B", "2xA100-80G", LORA, KEPT),
    ("Llama-3.1-8B", "4xH100", FULL, {**ZERO3, **VLLM}),
    ("Llama-3.2-1B", "2xA100-40G", FULL, ZERO2),
    ("Llama-3.2-1B", "A100-40G", {**LORA, **SFT}, KEPT),
    ("Qwen3-0.6B", "2xA100-40G", FULL, ZERO3),
    ("Qwen3-0.6B", "A100-40G", {**LORA, **SFT}, {}),
    ("Qwen2.5-0.5B", "2xH100", {**LORA, **SFT}, ZERO2),
    ("SmolLM2-1.7B", "A100-40G", LORA, {}),
    ("SmolLM2-1.7B", "2xH100", LORA, {**ZERO3, **VLLM}),
    ("SmolLM3-3B", "A100-40G", LORA, VLLM),
    ("Mistral-7B-v0.3", "2xA100-40G", LORA, KEPT),
    ("Phi-4", "2xH100", LORA, {}),
    ("Qwen2.5-14B", "2xH100", LORA, ZERO3),
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


def compared(
    candidate: Candidate,
    modelled: Prediction,
    traced: Prediction,
) -> dict[str, Any]:
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


def label_of(family: Family) -> dict[str, Any]:
    model, gpus, flags, change = family
    return {"model": model, "gpus": gpus, **flags, **change}


def rows_of(
    family: Family,
    points: int,
    earlier: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each point of a family that is not among the earlier rows."""
    model, gpus, flags, change = family
    label = label_of(family)
    compared_before = [row["knobs"] for row in earlier if row["family"] == label]
    draw = random.Random(f"{SEED} {label}")
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
            if dict(candidate.knobs) in compared_before:
                continue
            began = time.process_time()
            modelled = modelling.predict(candidate)
            seconds = time.process_time() - began
            row = compared(candidate, modelled, tracing.predict(candidate))
            yield {"family": label, **row, "cpu_seconds": round(seconds, 3)}


def earlier_rows() -> list[dict[str, Any]]:
    """Return the rows of the result file that this code's families still contain."""
    if not RESULTS.exists():
        return []
    labels = [label_of(family) for family in FAMILIES]
    rows = json.loads(RESULTS.read_text())["rows"]
    return [row for row in rows if row["family"] in labels]


def write_document(rows: Sequence[Mapping[str, Any]]) -> None:
    exceptions = [row for row in rows if is_exception(row)]
    largest = {name: max(abs(row[name]) for row in rows) for name in BARS}
    document = {
        "bars": BARS,
        "seed": SEED,
        "points": len(rows),
        "families": len({json.dumps(row["family"]) for row in rows}),
        "largest": largest,
        "exceptions": exceptions,
        "rows": rows,
        "machine": machine.facts(rows[0]["versions"]),
    }
    write_atomically(RESULTS, f"{json.dumps(document, indent=1)}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--points",
        type=int,
        default=6,
        help="of each family",
    )
    parser.add_argument(
        "--families",
        type=int,
        nargs="*",
        default=range(len(FAMILIES)),
    )
    parser.add_argument("--fresh", action="store_true", help="do not go on after earlier rows")
    options = parser.parse_args()
    rows = [] if options.fresh else earlier_rows()
    for number in options.families:
        for row in rows_of(FAMILIES[number], options.points, list(rows)):
            rows.append(row)
            mark = "EXCEPTION" if is_exception(row) else "equal"
            print(f"{mark}: {json.dumps(row)}", flush=True)
            write_document(rows)
    print(f"{len(rows)} points, {sum(map(is_exception, rows))} exceptions")


if __name__ == "__main__":
    main()

"""Advice of `predict`, compared with an exhaustive evaluation of every neutral change.

    make bench-advice

Configurations are drawn at random from families whose step models are shipped, until enough do not
fit. For each, every value of every neutral knob is predicted completely: all divisors of the batch,
all listed choices, shares in steps of 0.05. The fastest that surely fits has to be among the
advice, or one that prints the same speed; and the advice has to be the same in several runs.
Where no single change suffices, all pairs of neutral changes are predicted in the same way. Nothing
is measured, and no framework is needed. results/advice.json is written after each configuration. A
call goes on where the last one ended (delete the file for a new one), and `--seconds` ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import machine

from autotune.core.answer import WayToFit
from autotune.core.errors import AutotuneError
from autotune.core.files import write_atomically
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, KnobValue, as_flags
from autotune.prediction.service import PredictionService, open_prediction_service
from autotune.request.flags import flags_of
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import read_sources
from autotune.search.advice import ways_to_fit

RESULTS = Path(__file__).resolve().parent / "results" / "advice.json"
SEED = 8  # the configurations of seed 7 showed six misses, which were mended
BATCH = "per_device_train_batch_size"
STEPS = "gradient_accumulation_steps"
SHARE = "vllm_gpu_memory_utilization"
SAME_SPEED = 0.005  # ratios that print alike, at two digits

Change = Mapping[str, KnobValue]

MODELS = ("Qwen2.5-7B", "Llama-3.1-8B")
GPUS = ("A100-40G", "2xA100-40G", "H100", "RTX4090")
FLAGS: Sequence[Mapping[str, str]] = (
    {"tuning": "lora"},
    {"tuning": "lora", "method": "sft"},
    {"tuning": "full"},
)


def drawn_request(draw: random.Random) -> tuple[ParsedRequest, Candidate, Mapping[str, Any]]:
    """Return a request with a random configuration."""
    flags = dict(draw.choice(FLAGS))
    label = {"model": draw.choice(MODELS), "gpus": draw.choice(GPUS), **flags}
    request = read_sources(flags_of(label), mode="predict").parse(limit_prompts=True)
    base = candidate_of_job(request)
    rows, steps = base.settings[BATCH], base.settings[STEPS]
    assert isinstance(rows, int) and isinstance(steps, int)
    size = draw.choice([size for size in (1, 2, 4, 8, 16, 32) if rows * steps % size == 0])
    knobs: dict[str, Any] = {**base.knobs, BATCH: size, STEPS: rows * steps // size}
    knobs["gradient_checkpointing"] = draw.random() < 0.5
    for name in ("max_completion_length", "max_length"):
        if name in knobs:
            knobs[name] = draw.choice((1024, 2048, 4096))
    if "use_vllm" in knobs:
        knobs["use_vllm"] = draw.random() < 0.5
        knobs[SHARE] = draw.choice((0.3, 0.5, 0.7))
        knobs["vllm_enable_sleep_mode"] = draw.random() < 0.5
    candidate = completed(request, knobs)
    return request, candidate, {**label, **dict(candidate.knobs)}


def completed(request: ParsedRequest, knobs: Mapping[str, KnobValue]) -> Candidate:
    with_remedies = request.whole_space.with_remedies(dict(knobs))
    return request.trainer.complete(with_remedies, request.job.task)


def neutral_changes(request: ParsedRequest, candidate: Candidate) -> Iterator[Change]:
    """Yield every change of one neutral thing."""
    size, steps = candidate.settings[BATCH], candidate.settings[STEPS]
    assert isinstance(size, int) and isinstance(steps, int)
    for smaller in range(1, size):
        if size * steps % smaller == 0:
            yield {BATCH: smaller, STEPS: size * steps // smaller}
    space = request.whole_space
    for knob in (*space.knobs, *space.remedies):
        is_batch = knob.name in (BATCH, STEPS, "steps_per_generation")
        if is_batch or knob.effect_under(candidate.settings) == "learning":
            continue
        values: Sequence[KnobValue] = knob.choices
        if knob.name == SHARE:
            values = [percent / 100 for percent in range(5, 100, 5)]
        for value in values:
            if value is not None:
                yield {knob.name: value}


def exhaustive(
    request: ParsedRequest,
    candidate: Candidate,
    before: Prediction,
    service: PredictionService,
) -> list[tuple[float, Change]]:
    """Return the neutral changes that surely fit with their ratio of speeds, fastest first: single
    ones, or else pairs.
    """
    singles = list(neutral_changes(request, candidate))
    fitting = fitting_changes(request, candidate, before, service, singles)
    if fitting:
        return fitting
    pairs = []
    for first, second in itertools.combinations(singles, 2):
        if not first.keys() & second.keys():
            pairs.append({**first, **second})
    return fitting_changes(request, candidate, before, service, pairs)


def fitting_changes(
    request: ParsedRequest,
    candidate: Candidate,
    before: Prediction,
    service: PredictionService,
    changes: Sequence[Change],
) -> list[tuple[float, Change]]:
    """Return those of the changes that surely fit, fastest first."""
    fitting = []
    for change in changes:
        changed = completed(request, {**candidate.knobs, **change})
        illegal = request.trainer.why_illegal(changed, request.job.task)
        if changed == candidate or illegal is not None:
            continue
        with contextlib.suppress(AutotuneError):
            prediction = service.predict_if_fits(changed)
            if prediction is not None:
                fitting.append((_ratio(before, prediction), change))
    return sorted(fitting, key=lambda change: -change[0])


def _ratio(before: Prediction, after: Prediction) -> float:
    if before.tokens_per_second is None or after.tokens_per_second is None:
        return 0.0
    return after.tokens_per_second.value / before.tokens_per_second.value


def advice(request: ParsedRequest, candidate: Candidate) -> tuple[WayToFit, ...]:
    """Return the advice of a service without earlier predictions."""
    service = open_prediction_service(request.job, request.trainer, traces=False)
    with contextlib.closing(service):
        return ways_to_fit(request, candidate, service)


def row_of(
    request: ParsedRequest,
    candidate: Candidate,
    label: Mapping[str, Any],
    repeats: int,
) -> dict[str, Any] | None:
    """Return one comparison; None if the configuration fits or no step model answers."""
    service = open_prediction_service(request.job, request.trainer, traces=False)
    with contextlib.closing(service):
        try:
            before = service.predict(candidate)
        except AutotuneError:
            return None
        if before.fits:
            return None
        fitting = exhaustive(request, candidate, before, service)
    began = time.process_time()
    ways = advice(request, candidate)
    seconds = time.process_time() - began
    texts = {as_text(ways)}
    for _ in range(repeats - 1):
        texts.add(as_text(advice(request, candidate)))

    neutral = [way for way in ways if not way.learning]
    offered = max((way.speed_ratio or 0.0 for way in neutral), default=None)
    best = fitting[0] if fitting else None
    single = best is None or (offered is not None and offered >= best[0] - SAME_SPEED)
    return {
        "configuration": stated(label),
        "best": None if best is None else {"speed": round(best[0], 3), "change": dict(best[1])},
        "offered": [as_flags(way.change) for way in ways],
        "best_is_offered": single,
        "same_every_time": len(texts) == 1,
        "cpu_seconds": round(seconds, 2),
    }


def as_text(ways: Sequence[WayToFit]) -> str:
    return "\n".join(f"{as_flags(way.change)} {way.speed_ratio} {way.prediction}" for way in ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configurations", type=int, default=60)
    parser.add_argument(
        "--repeats",
        type=int,
        default=10,
        help="of the first six; then two",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="no row begins after them",
    )
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    earlier = earlier_rows()
    draw = random.Random(SEED)
    rows: list[dict[str, Any]] = []
    while len(rows) < options.configurations and time.monotonic() < deadline:
        try:
            drawn = drawn_request(draw)
        except AutotuneError:  # refused by the framework
            continue
        _, _, label = drawn
        row = row_among(earlier, label)
        if row is not None:
            rows.append(row)
            continue
        row = row_of(*drawn, options.repeats if len(rows) < 6 else 2)
        if row is not None:
            rows.append(row)
            print(json.dumps(row), flush=True)
            write_document(rows)
    print(f"{len(rows)} configurations, {len(missed_in(rows))} missed")


def earlier_rows() -> list[dict[str, Any]]:
    """Return the rows of the result file."""
    if not RESULTS.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"]
    return rows


def row_among(rows: Sequence[dict[str, Any]], label: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the row of a configuration; None if there is none."""
    for row in rows:
        if row["configuration"] == stated(label):
            return row
    return None


def stated(label: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in label.items() if value is not None}


def missed_in(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if not row["best_is_offered"]]


def write_document(rows: Sequence[Mapping[str, Any]]) -> None:
    varying = [row for row in rows if not row["same_every_time"]]
    document = {
        "seed": SEED,
        "configurations": len(rows),
        "with_a_neutral_change": sum(row["best"] is not None for row in rows),
        "missed": missed_in(rows),
        "varying": varying,
        "largest_cpu_seconds": max(row["cpu_seconds"] for row in rows),
        "rows": rows,
        "machine": machine.facts({}),
    }
    write_atomically(RESULTS, f"{json.dumps(document, indent=1)}\n".encode())


if __name__ == "__main__":
    main()

"""Predicted seconds of verl's phases, and those of its public logs.

make bench-verl-logs

Rows of verl-rows.json: verl 0.4 with LoRA on GSM8K, an eager vLLM 0.8 or 0.9, all state offloaded
between the phases. A row is the mean of some steps. Cards are H100s by their peak, which
`perf/mfu/actor` divides by. Lengths are drawn from the lognormal distribution with the row's mean
and longest completion.

Generation includes the weights' way to the engine, as in the logs (`timing_s/gen`).
Log-probabilities are those of the policy and of the reference, the update all of `update_actor`.

The engine is predicted as vLLM 0.8, whatever is installed here: its host works for each sequence
after the device's step. That cost was found on four of these logs, so that their generation is in
sample (`engine_sequence_microseconds_first_engine`), and what the host takes for an adapter's units
on all six (`adapter_unit_host_milliseconds`). Rows with `read` were first read with the code before
that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import machine
from stored_rows import stored

from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate, Prediction
from autotune.estimate.throughput import generation
from autotune.prediction.service import open_prediction_service
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import parse_request

HERE = Path(__file__).resolve().parent
ROWS = HERE / "verl-rows.json"
RESULTS = HERE / "results"
Row = Mapping[str, Any]

PHASES: Mapping[str, tuple[Phase, ...]] = {
    "generation": ("rollout", "sync"),
    "log_probabilities": ("score",),
    "update": ("forward", "backward", "optimizer"),
}
ENGINE = (0, 8)
"""Release of vLLM."""

GENERATIONS = 5
WITHIN = 0.3
"""Largest error of a phase that counts as right."""

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, help="folder of compared rows, read and extended")
    options = parser.parse_args()
    stated = json.loads(ROWS.read_text())
    lines = []
    for row in stated["rows"]:
        name = row["model"].rpartition("/")[2]
        lines.append(stored(name, options.keep, partial(compared, row)))
        print(readable_line(lines[-1]), flush=True)
    document = {
        "schema": 1,
        "ran_on": machine.facts({}),
        "source": stated["source"],
        "figures": figures(lines),
        "rows": lines,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "verl-logs.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.out / "verl-logs.md").write_text(page(document))
    return 0


def compared(row: Row) -> dict[str, Any]:
    seconds = predicted(row).seconds_at_lengths
    line = dict(row)
    for name, phases in PHASES.items():
        spent = Estimate.exactly(0)
        for phase in phases:
            spent = spent + seconds[phase]
        line[f"predicted_{name}"] = {
            "value": round(spent.value, 2),
            "low": round(spent.low, 2),
            "high": round(spent.high, 2),
        }
    return line


def predicted(row: Row) -> Prediction:
    """Return the product's prediction of the row's settings."""
    settings = []
    for name, value in _settings(row).items():
        settings.append(f"{name}={json.dumps(value)}")
    flags = Flags(
        framework="verl",
        method="grpo",
        tuning="lora",
        model=row["model"],
        gpus=f"{row['gpus']}xH100",
        mode="predict",
        set=tuple(settings),
        lengths=_lognormal(row["completion_mean"], row["completion_longest"], row["prompts"]),
        prompt_lengths=_lognormal(row["prompt_mean"], row["prompt_longest"], row["prompts"]),
    )
    request = parse_request(flags)
    of_logs = mock.patch.object(generation, "release", lambda _: ENGINE)
    opened = open_prediction_service(request.job, request.trainer)
    with of_logs, contextlib.closing(opened) as service:
        return service.predict(candidate_of_job(request))


def _settings(row: Row) -> dict[str, object]:
    prompts = row["prompts"]
    return {
        "data.train_batch_size": prompts,
        "data.max_prompt_length": 512,
        "data.max_response_length": 1024,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "actor_rollout_ref.model.lora_rank": 32,
        "actor_rollout_ref.model.target_modules": "all-linear",
        "actor_rollout_ref.model.use_remove_padding": True,
        f"{ACTOR}.ppo_mini_batch_size": prompts,
        f"{ACTOR}.ppo_micro_batch_size": prompts,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.fsdp_config.param_offload": True,
        f"{ACTOR}.fsdp_config.optimizer_offload": True,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": GENERATIONS,
        f"{ROLLOUT}.tensor_model_parallel_size": row["tensor_parallel"],
        f"{ROLLOUT}.gpu_memory_utilization": row["share"],
        f"{ROLLOUT}.max_num_seqs": 512,
        f"{ROLLOUT}.max_model_len": 1536,
        f"{ROLLOUT}.max_num_batched_tokens": 1536,
        f"{ROLLOUT}.enforce_eager": True,
        f"{ROLLOUT}.load_format": "safetensors",
        f"{ROLLOUT}.layered_summon": True,
        f"{ROLLOUT}.log_prob_micro_batch_size": prompts,
        f"{REFERENCE}.log_prob_micro_batch_size": prompts,
        f"{REFERENCE}.fsdp_config.param_offload": True,
    }


def _lognormal(mean: float, longest: float, prompts: int) -> str:
    """Return the lognormal distribution with this mean whose longest of a batch is `longest`.

    With s the deviation of the logarithm and z that of the longest of n from its mean:

        ln(longest / mean) = z s - s² / 2,    z² = 2 ln n
    """
    z = math.sqrt(2 * math.log(prompts * GENERATIONS))
    deviation = z - math.sqrt(z * z - 2 * math.log(longest / mean))
    quantile = mean * math.exp(1.645 * deviation - deviation * deviation / 2)
    return f"lognormal:{mean:g},{quantile:.1f}"


# Figures.


def figures(lines: Sequence[Row]) -> dict[str, Any]:
    by_phase = {}
    for name in PHASES:
        ratios = []
        inside = 0
        for line in lines:
            spent = line[f"predicted_{name}"]
            ratios.append(spent["value"] / line[name])
            inside += spent["low"] <= line[name] <= spent["high"]
        by_phase[name] = {
            "rows": len(lines),
            "median_error": round(median(abs(ratio - 1) for ratio in ratios), 3),
            "within_30_percent": sum(abs(ratio - 1) <= WITHIN for ratio in ratios),
            "inside": inside,
            "lowest_ratio": round(min(ratios), 2),
            "highest_ratio": round(max(ratios), 2),
        }
    return by_phase


def page(document: Mapping[str, Any]) -> str:
    ran = document["ran_on"]
    lines = [
        "# Predicted and measured seconds of verl's phases",
        "",
        (
            f"Measured: {document['source']}. Predicted: {ran.get('date')}, commit"
            f" {ran.get('commit')}. In sample: what an engine's host takes for each sequence was"
            " found on these logs without those of 1.5B and 32B, what a trainer's host takes for"
            " each matrix of an adapter on all of them."
        ),
        "",
        "| phase | rows | median error | within 30 % | inside | predicted / measured |",
        "|---|---|---|---|---|---|",
    ]
    for name, counted in document["figures"].items():
        lines.append(
            f"| {name.replace('_', ' ')} | {counted['rows']} | {counted['median_error']:.0%} |"
            f" {counted['within_30_percent']} | {counted['inside']} |"
            f" {counted['lowest_ratio']} to {counted['highest_ratio']} |"
        )
    lines += [
        "",
        "| model | H100 | steps | generation | log-probabilities | update |",
        "|---|---|---|---|---|---|",
    ]
    lines += map(readable_line, document["rows"])
    return "\n".join(lines) + "\n"


def readable_line(line: Row) -> str:
    cells = [line["model"].rpartition("/")[2], str(line["gpus"]), line["steps"]]
    for name in PHASES:
        spent = line[f"predicted_{name}"]
        cells.append(
            f"{spent['value']:.1f} ({spent['low']:.1f} to {spent['high']:.1f}),"
            f" measured {line[name]:.1f}"
        )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())

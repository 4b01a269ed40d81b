"""Verdicts on verl rows: the product's own prediction, at the longest rows and at lengths that
occur.

The rows state the longest lengths. verl's scripts train on GSM8K, whose lengths its public logs
state: they are no fact of the row, so that the second verdict is written beside the first and
decides nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from autotune.core.errors import AutotuneError
from autotune.core.prediction import Prediction
from autotune.prediction.service import open_prediction_service
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request

GPUS = {"H800": "H100", "A800": "A100-80G"}
"""The same chip and memory, with slower links."""

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PLAIN = {
    "train_batch_size": "data.train_batch_size",
    "max_prompt_length": "data.max_prompt_length",
    "max_response_length": "data.max_response_length",
    "ppo_mini_batch_size": f"{ACTOR}.ppo_mini_batch_size",
    "ppo_micro_batch_size_per_gpu": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    "log_prob_micro_batch_size_per_gpu": f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    "rollout_tp": f"{ROLLOUT}.tensor_model_parallel_size",
    "gpu_memory_utilization": f"{ROLLOUT}.gpu_memory_utilization",
}
"""Short names in reports of users."""

NOT_SETTINGS = {"nproc_per_gpu", "trainer.n_gpus_per_node", "trainer.nnodes"}
GSM8K = {"lengths": "lognormal:288.7,460", "prompt_lengths": "lognormal:104.9,150"}
"""Completions: mean 288.7, longest 963 of 5,120 (a user's log, verl issue 2060); prompts: mean
104.9, longest 175 of 256 (verl, docs/start/quickstart.rst).
"""


def decide(row: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return verdict and interval of a row."""
    try:
        prediction = predicted(row, model)
    except AutotuneError as error:
        return {"verdict": None, "depends_on": [str(error)[:200]]}
    at_lengths = prediction.peak_memory_bytes_at_lengths
    assert at_lengths is not None
    return {
        "verdict": prediction.fits,
        "depends_on": list(prediction.depends_on),
        "peak_memory_bytes": _interval(
            prediction.peak_memory_bytes.low, prediction.peak_memory_bytes.high
        ),
        "at_gsm8k_lengths": {
            "verdict": prediction.fits_at_lengths,
            **_interval(at_lengths.low, at_lengths.high),
        },
    }


def predicted(row: Mapping[str, Any], model: str) -> Prediction:
    request = request_of(row, model)
    with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:
        return service.predict(candidate_of_job(request))


def request_of(row: Mapping[str, Any], model: str) -> ParsedRequest:
    """Return the row's settings as the product reads them."""
    settings = {}
    for name, value in row["config"].items():
        if name not in NOT_SETTINGS:
            settings[PLAIN.get(name, name)] = value
    if row["lora_rank"]:
        settings["actor_rollout_ref.model.lora_rank"] = row["lora_rank"]
    gpu = GPUS.get(str(row["gpu"]), row["gpu"])
    flags = Flags(
        framework="verl",
        method=row["method"],
        tuning=row["tuning"],
        model=model,
        gpus=f"{row['gpus']}x{gpu}",
        mode="predict",
        set=tuple(f"{name}={json.dumps(value)}" for name, value in settings.items()),
        **GSM8K,
    )
    return parse_request(flags)


def _interval(low: float, high: float) -> dict[str, int]:
    return {"low": round(low), "high": round(high)}

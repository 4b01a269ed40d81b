"""Public reports of what fitted and what ran out of memory, against what is predicted from the
facts that they state.

Where a report leaves open what decides, the answer is that it depends. What must not be: an
out-of-memory called a fit, or a run that went through called impossible.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.core.prediction import Prediction
from autotune.prediction.service import open_prediction_service
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import parse_request

REPORTS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("stand_in_verdicts.json").read_text()
)
ACTOR, ROLLOUT, MODEL = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
)
SHARED: dict[str, dict[str, object]] = {
    "verl-7b-lora": {
        "data.max_prompt_length": 512,
        "data.max_response_length": 1024,
        f"{MODEL}.lora_rank": 32,
        f"{MODEL}.lora_alpha": 32,
        f"{MODEL}.enable_gradient_checkpointing": True,
        f"{MODEL}.use_remove_padding": True,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.entropy_coeff": 0.001,
        f"{ACTOR}.fsdp_config.param_offload": True,
        f"{ACTOR}.fsdp_config.optimizer_offload": True,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.gpu_memory_utilization": 0.2,
        f"{ROLLOUT}.n": 5,
        f"{ROLLOUT}.max_num_seqs": 512,
        f"{ROLLOUT}.max_model_len": 1536,
        f"{ROLLOUT}.max_num_batched_tokens": 1536,
    },
    "openrlhf-7b": {
        "train.colocate_all": False,
        # Policy and engines are all 12 GPUs: the reference can only share the policy's.
        "train.colocate_actor_ref": True,
        "actor.num_gpus_per_node": 8,
        "vllm.num_engines": 1,
        "vllm.tensor_parallel_size": 4,
        "data.max_len": 26048,
        "rollout.max_new_tokens": 13024,
        "rollout.batch_size": 8,
        "rollout.micro_batch_size": 2,
        "rollout.n_samples_per_prompt": 8,
        "train.batch_size": 16,
        "ds.zero_stage": 3,
        "ds.adam_offload": False,
        "ds.enable_sleep": False,
        "ds.packing_samples": False,
        "actor.gradient_checkpointing_enable": True,
        "algo.kl.use_loss": True,
    },
}
"""Settings that several reports have in common."""


def foreseen(report: dict[str, Any]) -> Prediction:
    stated = dict(report["settings"])
    settings = {**SHARED.get(str(stated.pop("$like", "")), {}), **stated}
    typed = tuple(f"{name}={json.dumps(value)}" for name, value in settings.items())
    about = {name: report[name] for name in ("framework", "method", "tuning", "model", "gpus")}
    understood = parse_request(Flags(**about, set=typed, mode="predict"))
    with contextlib.closing(
        open_prediction_service(understood.job, understood.trainer)
    ) as foresight:
        return foresight.predict(candidate_of_job(understood))


@pytest.mark.slow
@pytest.mark.parametrize("report", REPORTS, ids=[report["id"] for report in REPORTS])
def test_no_verdict_is_the_opposite_of_what_happened(report: dict[str, Any]) -> None:
    prediction = foreseen(report)
    assert prediction.basis == "generic"
    assert prediction.fits is not (report["outcome"] == "oom")
    if prediction.fits is None:
        assert prediction.depends_on


@pytest.mark.slow
def test_the_larger_micro_batch_takes_more() -> None:
    """Not that it is undecided alone: the pair that one report tells apart is in the right
    order.
    """
    small, large = (foreseen(report) for report in REPORTS if report["id"].startswith("openrlhf"))
    assert large.peak_memory_bytes.high > 1.3 * small.peak_memory_bytes.high

"""Whether the user's configuration evaluates, and what an evaluation's memory depends on."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.trainers.base import Job

SETTINGS = (
    "per_device_eval_batch_size", "num_generations_eval", "eval_accumulation_steps", "prediction_loss_only", "bf16_full_eval",
    "fp16_full_eval",
)  # fmt: skip


def evaluation_request(job: Job) -> Mapping[str, object] | None:
    """None where the run never evaluates: then a certificate needs no evaluation either."""
    user = {**job.workload.held, **job.workload.user_settings}
    if user.get("eval_strategy") in (None, "no", False):  # YAML reads an unquoted no as false
        return None
    return {"settings": {name: user[name] for name in SETTINGS if user.get(name) is not None}}

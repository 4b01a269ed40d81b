"""PPO with TRL up to 1.12: policy, reference, critic and reward model on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.core.composition import Composition
from autotune.core.job import Task
from autotune.core.space import Candidate
from autotune.frameworks import stand_in_step
from autotune.frameworks.base import STAND_IN, Settings, count_of
from autotune.frameworks.stand_in_step import MASTER_AND_MOMENTS, OtherModel, StandInSpec
from autotune.frameworks.trl.requests import adapter_request, sharding_request
from autotune.frameworks.trl.settings import DEEPSPEED, ranks_of
from autotune.frameworks.trl.trainers import TrlScripted

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES = {
    "sgd": 0,
    "adafactor": 0,
}  # optimizer -> states of a weight's own size; the default is Adam's two moments


class TrlPpo(TrlScripted):
    """Later releases lack the trainer, so that predictions use a stand-in step."""

    method = space = "ppo"
    trace_adapter = STAND_IN
    requires: Mapping[str, str] = {"trl": "trl>=1.0,<1.13"}
    canonical: Mapping[str, str] = {
        "max_prompt_length": "max_prompt_length",
        "max_completion_length": "response_length",
        "lora_r": "lora_r",
    }

    def trace_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        return stand_in_step.trace_request(_step(candidate, task), task)

    def compose(self, candidate: Candidate, task: Task) -> Composition:
        return stand_in_step.compose(_step(candidate, task), task)


def _step(candidate: Candidate, task: Task) -> StandInSpec:
    """Return the stand-in step of TRL's PPO, which newer releases cannot trace.

    Written for `trl.experimental.ppo` of TRL 1.8 (`PPOTrainer`, `PolicyAndValueWrapper`).
    Assumptions:

    - Policy and critic are one module: both run forward, and one backward pass covers both. The critic
      is trained in full, also with an adapter, and needs no more memory than a policy of its size.
    - `train` is a loop of its own without checkpointing and gradient clipping.
    - It generates and scores `local_rollout_forward_batch_size` completions at a time. The float32
      logits of all of them stay until the next rollout. torch's cache is emptied in between.
    - Reference and reward model are replicated on every GPU, and sharded with ZeRO-3.
    """
    settings, ranks = candidate.settings, ranks_of(candidate.settings, task.hardware.count)
    prompt, completion = (
        count_of(settings, "max_prompt_length"),
        count_of(settings, "response_length"),
    )
    rows, steps = (
        count_of(settings, "per_device_train_batch_size"),
        count_of(settings, "gradient_accumulation_steps"),
    )
    at_a_time = min(count_of(settings, "local_rollout_forward_batch_size"), rows * steps)
    sharding, dtype, attention = (
        sharding_request(candidate, task),
        str(settings["dtype"]),
        settings.get("attn_implementation"),
    )
    options = sharding.get("options")
    return StandInSpec(
        prompt_length=prompt,
        completion_length=completion,
        tokens=rows * (prompt + completion),
        score_tokens=at_a_time * (prompt + completion),
        micro_batch=rows,
        accumulation=steps,
        generation_batch=rows * steps * ranks,
        ranks=ranks,
        sharded_by=str(sharding["kind"]),
        options=options if isinstance(options, Mapping) else {},
        traced_dtype=dtype,
        held_dtype=dtype,
        mixed=bool(settings.get("bf16")),
        adapter=adapter_request(candidate, task),
        widens_adapter=True,
        quantised=bool(settings.get("load_in_4bit")),
        checkpointing=False,
        optimizer=str(settings["optim"]),
        clip=0.0,
        attention=attention if isinstance(attention, str) else None,
        others=tuple(_others(settings, task, dtype, str(sharding["kind"]))),
        generation="trainer",
        generation_micro_batch=at_a_time,
        retained_logits=rows * steps,
        empties_rollout_cache=True,
        notes=tuple(_notes(settings, task)),
    )


def _others(settings: Settings, task: Task, dtype: str, sharding: str) -> Iterator[OtherModel]:
    """Yield the other models. With an adapter, the reference is the policy itself."""
    judge, whole = _reward_model(task), sharding != "zero3"
    if not settings.get("use_peft"):
        yield OtherModel(role="reference", model=task.workload.model.name, dtype=dtype, whole=whole)
    optimizer = str(settings["optim"])
    state = STATES.get(optimizer, 2) * (1 if "8bit" in optimizer else WEIGHT_BYTES.get(dtype, 2))
    if settings.get("offload_optimizer_device") == "cpu":
        state = 0
    elif sharding in DEEPSPEED:
        state = MASTER_AND_MOMENTS
    yield OtherModel(
        role="critic",
        model=judge,
        dtype=dtype,
        trains=True,
        trains_concurrently=True,
        quantised=False,
        state_bytes_per_weight=state,
    )
    yield OtherModel(role="reward", model=judge, dtype=dtype, whole=whole, quantised=False)


def _reward_model(task: Task) -> str:
    """Return the reward model, which initialises the critic; the default is the policy's shape."""
    named = task.workload.user_settings.get("reward_model_path") or task.workload.held.get(
        "reward_model_path"
    )
    return str(named or task.workload.model.name)


def _notes(settings: Settings, task: Task) -> Iterator[str]:
    yield "modelled on TRL 1.8; releases from 1.13 lack PPO, so that they cannot measure it"
    yield (
        "policy and critic train in one pass; the float32 logits of all completions stay until the"
        " next rollout"
    )
    if settings.get("gradient_checkpointing"):
        yield "gradient_checkpointing has no effect: TRL's PPO never enables it"
    if _reward_model(task) == task.workload.model.name:
        yield (
            "assumed: reward model and critic have the policy's shape, since no reward_model_path"
            " is given"
        )

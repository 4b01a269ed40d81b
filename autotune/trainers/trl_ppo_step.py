"""What a step of TRL's PPO holds, in the common words of a stand-in step: its own can be followed in no newer release.

Read from `trl.experimental.ppo` of TRL 1.8 (`PPOTrainer`, `PolicyAndValueWrapper`). What stands in:

- Policy and critic are one module: both run forward, and one backward pass goes through both. The critic is trained whole,
  under an adapter too, and takes no more for a step than a policy of its size.
- Its `train` is a loop of its own, which never switches checkpointing on and clips no gradients, whatever the settings say.
- Completions are written `local_rollout_forward_batch_size` at a time, and scored so. The float32 logits of all of them are
  kept, and given back only when those of the next rollout are there. torch's cache is given back in between.
- Reference and reward model are whole on every GPU, and cut under ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.candidate import Candidate
from autotune.trainers.base import Job, count_of
from autotune.trainers.generic_step import MASTER_AND_MOMENTS, Other, Step
from autotune.trainers.trl_requests import adapter_request, sharding_request
from autotune.trainers.trl_topology import DEEPSPEED, ranks_of, sharding_of

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES = {"sgd": 0, "adafactor": 0}
"""Of a weight's own size that an optimizer keeps; Adam's two are the rule."""

Settings = Mapping[str, object]


def step_of(candidate: Candidate, job: Job) -> Step:
    settings, ranks = candidate.settings, ranks_of(candidate.settings, job.hardware.count)
    prompt, completion = count_of(settings, "max_prompt_length"), count_of(settings, "response_length")
    rows, steps = count_of(settings, "per_device_train_batch_size"), count_of(settings, "gradient_accumulation_steps")
    at_a_time = min(count_of(settings, "local_rollout_forward_batch_size"), rows * steps)
    sharding, dtype = sharding_request(candidate, job), str(settings["dtype"])
    options = sharding.get("options")
    return Step(
        prompt=prompt,
        completion=completion,
        tokens=rows * (prompt + completion),
        score_tokens=at_a_time * (prompt + completion),
        rows=rows,
        accumulation=steps,
        generation_batch=rows * steps * ranks,
        ranks=ranks,
        sharding=str(sharding["kind"]),
        options=options if isinstance(options, Mapping) else {},
        traced_dtype=dtype,
        held_dtype=dtype,
        mixed=bool(settings.get("bf16")),
        adapter=adapter_request(candidate, job),
        widens_adapter=True,
        quantised=bool(settings.get("load_in_4bit")),
        loss="logprobs",
        checkpointing=False,
        optimizer=str(settings["optim"]),
        clip=0.0,
        attention=_text(settings, "attn_implementation"),
        others=tuple(_others(settings, job, dtype)),
        generation="trainer",
        writes_at_a_time=at_a_time,
        keeps_logits_of=rows * steps,
        empties_cache=True,
        notes=tuple(_notes(settings, job)),
    )


def _others(settings: Settings, job: Job, dtype: str) -> Iterator[Other]:
    """Without an adapter the reference is a copy of the policy; with one it is the policy itself."""
    model, judge = job.workload.model.name, _reward_model(job)
    sharding = sharding_of(settings, ranks_of(settings, job.hardware.count))
    whole = sharding != "zero3"
    if not settings.get("use_peft"):
        yield Other(role="reference", model=model, dtype=dtype, whole=whole)
    yield Other(
        role="critic", model=judge, dtype=dtype, trains=True, trains_along=True, as_quantised=False,
        state_bytes_per_weight=_state_bytes(settings, dtype, sharding),
    )  # fmt: skip
    yield Other(role="reward", model=judge, dtype=dtype, whole=whole, as_quantised=False)


def _reward_model(job: Job) -> str:
    """The critic begins as it; of the policy's shape where the user names none, as a probe makes it."""
    named = job.workload.user_settings.get("reward_model_path") or job.workload.held.get("reward_model_path")
    return str(named or job.workload.model.name)


def _state_bytes(settings: Settings, dtype: str, sharding: str) -> int:
    if settings.get("offload_optimizer_device") == "cpu":
        return 0
    if sharding in DEEPSPEED:
        return MASTER_AND_MOMENTS
    optimizer = str(settings["optim"])
    each = 1 if "8bit" in optimizer else WEIGHT_BYTES.get(dtype, 2)
    return STATES.get(optimizer, 2) * each


def _notes(settings: Settings, job: Job) -> Iterator[str]:
    yield "written after TRL 1.8: releases from 1.13 on have no PPO to measure this with"
    yield "policy and critic learn in one pass; the float32 logits of all completions are kept until the next rollout is written"
    if settings.get("gradient_checkpointing"):
        yield "gradient_checkpointing has no effect: TRL's PPO never switches it on"
    if _reward_model(job) == job.workload.model.name:
        yield "reward model and critic are taken to be of the policy's shape, for no reward_model_path is given"


def _text(settings: Settings, name: str) -> str | None:
    value = settings.get(name)
    return value if isinstance(value, str) else None

"""Open-Reasoner-Zero: PPO on packed rows with DeepSpeed, one Ray actor per model.

Written for its repository at 3fdd9a07b4 (`orz/ppo/{trainer,actors,models,utils}.py`,
`playground/orz_7b_ppo.py`). Assumptions of the stand-in step:

- DeepSpeed's settings stay at `auto` and are dropped, so that DeepSpeed's defaults apply.
- Log-softmax over all logits in bfloat16. The policy's entropy, which is only logged, has one of its own; it, its part for the
  completions and the logits stay until the step ends (`training_step` in `orz/ppo/actors.py`).
- With `colocate_all`, gradients and optimizer states of policy and critic are offloaded to the
  host by turns with vLLM. Their bfloat16 weights stay on the device, like the reference's.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.core.job import Task
from autotune.core.space import KnobValue
from autotune.frameworks.base import Settings, model_path
from autotune.frameworks.stand_in import StandIn
from autotune.frameworks.stand_in_step import MASTER_AND_MOMENTS, OtherModel

# lower bound of vLLM's `max_num_batched_tokens` without chunked prefill; else the longest sequence
ENGINE_TOKENS = 2048


class OpenReasonerZero(StandIn):
    def argument(self, name: str, value: KnobValue) -> str:
        return f"exp.{name}={shlex.quote(str(value))}"

    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        each = ("total_num_nodes", "actor_num_nodes", "ref_num_nodes", "vllm_num_engines")
        critic = ("critic_num_nodes",) if self.method == "ppo" else ()
        found: dict[str, KnobValue] = dict.fromkeys((*each, *critic), task.hardware.count)
        found["use_grpo"] = self.method == "grpo"
        # The default is the experiment's 7B model regardless of `pretrain`. Any named critic is
        # loaded.
        found["critic_pretrain"] = model_path(task) if self.method == "ppo" else ""
        longest = sum(self.lengths(settings))
        if {"prompt_max_len", "generate_max_len"} & set(settings):
            found["packing_max_len"] = max(longest, self.table.count(settings, "packing_max_len"))
            found["max_len"] = longest
        return found

    def sizes(self, settings: Settings, task: Task) -> dict[str, int]:
        count, gpus, longest = self.table.count, task.hardware.count, sum(self.lengths(settings))
        budget = count(settings, "packing_max_len")
        samples = count(settings, "rollout_batch_size") * count(settings, "n_samples_per_prompt")
        packs = max(1, samples * longest // max(1, budget * gpus))
        return {
            "tokens": budget,
            "score_tokens": budget,
            "micro_batch": max(1, budget // max(1, longest)),
            "accumulation": max(1, packs // max(1, count(settings, "policy_update_steps"))),
            "generation_batch": samples,
            "ranks": gpus,
            "one_row": min(longest, budget),
        }

    def composition(self, settings: Settings, task: Task) -> Mapping[str, Any]:
        count, truth = self.table.count, self.table.truth
        stage, together = count(settings, "zero_stage"), truth(settings, "colocate_all")
        whole_prompts = {"max_num_batched_tokens": max(ENGINE_TOKENS, sum(self.lengths(settings)))}
        chunks = truth(settings, "enable_chunked_prefill")
        others = tuple(self._others(settings, task, stage, together=together))
        prompt, completion = self.lengths(settings)
        return {
            "sharded_by": f"zero{stage}",
            "options": (
                {"offload_optimizer": {"device": "cpu"}} if truth(settings, "adam_offload") else {}
            ),
            "attention": "flash_attention_2" if truth(settings, "flash_attn") else "eager",
            "loss_options": {"held": completion / max(1, prompt + completion)},
            "score_options": {"held": None},
            "others": others,
            "generation": "engine" if together else "server",
            "engine": (
                self.engine_settings(settings, **({} if chunks else whole_prompts))
                if together
                else None
            ),
            "processes": 1 + len(others) + together,
            "offloaded_in_rollout": ("gradients", "optimizer") if together else (),
        }

    def _others(
        self, settings: Settings, task: Task, stage: int, *, together: bool
    ) -> Iterator[OtherModel]:
        table, model = self.table, task.workload.model.name
        away: tuple[()] | None = (
            () if table.truth(settings, "ref_reward_offload") and stage == 3 else None
        )
        if together or table.truth(settings, "colocate_actor_ref"):
            yield OtherModel(role="reference", model=model, whole=stage < 3, awake=away)
        if not together:
            return
        critic = table.text(settings, "critic_pretrain")
        if critic:
            yield OtherModel(
                role="critic",
                model=model if critic == model_path(task) else critic,
                trains=True,
                state_bytes_per_weight=0,
                offloaded_bytes_per_weight=(
                    0 if table.truth(settings, "adam_offload") else MASTER_AND_MOMENTS
                ),
            )
        reward = table.text(settings, "reward_pretrain").split(",")[0]
        if reward:
            yield OtherModel(role="reward", model=reward, whole=stage < 3, awake=away)


TRAINERS = tuple(OpenReasonerZero("open-reasoner-zero", method) for method in ("grpo", "ppo"))

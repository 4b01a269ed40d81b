"""Open-Reasoner-Zero: PPO on packed rows with DeepSpeed, one Ray actor per model.

Written for its repository at 3fdd9a07b4 (`orz/ppo/{trainer,actors,models,utils}.py`,
`playground/orz_7b_ppo.py`). Assumptions of the stand-in step:

- DeepSpeed's settings stay at `auto` and are dropped, so that DeepSpeed's defaults apply.
- Log-softmax over all logits in bfloat16; its entropy is computed in small chunks.
- With `colocate_all`, gradients and optimizer states of policy and critic are offloaded to the
  host by turns with vLLM. Their bfloat16 weights stay on the device, like the reference's.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from autotune.core.candidate import KnobValue
from autotune.core.task import Task
from autotune.frameworks.base import Settings, model_path
from autotune.frameworks.stand_in import StandIn
from autotune.frameworks.stand_in_step import MASTER_AND_MOMENTS, OtherModel, StandInSpec

ENGINE_TOKENS = 2048
"""Lower bound of vLLM's `max_num_batched_tokens` without chunked prefill; else the longest sequence."""


class OpenReasonerZero(StandIn):
    def argument(self, name: str, value: KnobValue) -> str:
        return f"exp.{name}={shlex.quote(str(value))}"

    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        gpus = task.hardware.count
        each = ("total_num_nodes", "actor_num_nodes", "ref_num_nodes", "vllm_num_engines")
        found: dict[str, KnobValue] = dict.fromkeys(each, gpus)
        if self.method == "ppo":
            found["critic_num_nodes"] = gpus
        found["use_grpo"] = self.method == "grpo"
        # The default is the experiment's 7B model regardless of `pretrain`. Any named critic is loaded.
        found["critic_pretrain"] = model_path(task) if self.method == "ppo" else ""
        longest = sum(self.lengths(settings))
        if {"prompt_max_len", "generate_max_len"} & set(settings):
            found["packing_max_len"] = max(longest, self.table.count(settings, "packing_max_len"))
            found["max_len"] = longest
        return found

    def lengths(self, settings: Settings) -> tuple[int, int]:
        return self.table.count(settings, "prompt_max_len"), self.table.count(settings, "generate_max_len")

    def step(self, settings: Settings, task: Task) -> StandInSpec:
        table, count, truth = self.table, self.table.count, self.table.truth
        prompt, completion = self.lengths(settings)
        budget, stage, gpus = count(settings, "packing_max_len"), count(settings, "zero_stage"), task.hardware.count
        samples = count(settings, "rollout_batch_size") * count(settings, "n_samples_per_prompt")
        packs = max(1, samples * (prompt + completion) // max(1, budget * gpus))
        together = truth(settings, "colocate_all")
        chunks = truth(settings, "enable_chunked_prefill")
        whole_prompts = {} if chunks else {"max_num_batched_tokens": max(ENGINE_TOKENS, prompt + completion)}
        engine = self.engine_settings(settings, **whole_prompts) if together else None
        others = tuple(self._others(settings, task, stage, together=together))
        return StandInSpec(
            prompt_length=prompt,
            completion_length=completion,
            tokens=budget,
            score_tokens=budget,
            micro_batch=max(1, budget // (prompt + completion)),
            accumulation=max(1, packs // max(1, count(settings, "policy_update_steps"))),
            generation_batch=samples,
            packs_rows=True,
            ranks=gpus,
            sharded_by=f"zero{stage}",
            options={"offload_optimizer": {"device": "cpu"}} if truth(settings, "adam_offload") else {},
            loss="logprobs_plain",
            checkpointing=truth(settings, "gradient_checkpointing"),
            reentrant=truth(settings, "gradient_checkpointing_use_reentrant"),
            optimizer="adamw_torch_fused",
            clip=table.share(settings, "max_norm"),
            attention="flash_attention_2" if truth(settings, "flash_attn") else "eager",
            others=others,
            generation="engine" if together else "server",
            engine=engine,
            processes=1 + len(others) + (engine is not None),
            offloaded_in_rollout=("gradients", "optimizer") if together else (),
            notes=tuple(self._notes(settings)),
        )

    def _others(self, settings: Settings, task: Task, stage: int, *, together: bool) -> Iterator[OtherModel]:
        table, model = self.table, task.workload.model.name
        away: tuple[()] | None = () if table.truth(settings, "ref_reward_offload") and stage == 3 else None
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
                offloaded_bytes_per_weight=0 if table.truth(settings, "adam_offload") else MASTER_AND_MOMENTS,
            )
        reward = table.text(settings, "reward_pretrain").split(",")[0]
        if reward:
            yield OtherModel(role="reward", model=reward, whole=stage < 3, awake=away)

    def with_one_row(self, settings: Settings) -> Mapping[str, KnobValue]:
        return {"packing_max_len": min(sum(self.lengths(settings)), self.table.count(settings, "packing_max_len"))}

    def _notes(self, settings: Settings) -> Iterator[str]:
        yield f"modelled on Open-Reasoner-Zero at {self.table.version}: each model on a GPU is a separate process"
        yield "vLLM runs without CUDA graphs, as with colocate_all, and frees its weights and cache during training"
        if not self.table.truth(settings, "colocate_all"):
            yield "only the policy's GPUs are modelled, not those of vLLM, critic and rewards"
        elif self.table.text(settings, "critic_pretrain"):
            yield "policy and critic train by turns; the idle one keeps only its bfloat16 weights on the device"

    def rules(self, settings: Settings, task: Task) -> Iterator[str]:
        """Yield violations of `_validate_args` (orz/ppo/utils.py), `create_vllm_engines`, `build_models`."""
        table, count, gpus = self.table, self.table.count, task.hardware.count
        if task.workload.tuning != "full":
            yield "Open-Reasoner-Zero trains all weights: use --tuning full."
        for name in ("rollout_batch_size", "n_samples_per_prompt", "micro_rollout_batch_size", "policy_update_steps"):
            if count(settings, name) < 1:
                yield f"{name}={settings.get(name)} is not above zero."
        budget = count(settings, "packing_max_len")
        longest = sum(self.lengths(settings))
        if budget < longest:
            yield f"packing_max_len={budget} is less than prompt_max_len + generate_max_len = {longest}."
        for name in ("micro_train_batch_size", "micro_forward_batch_size"):
            if count(settings, name) != 1:
                yield f"{name}={count(settings, name)} must be 1, since rows are packed: change packing_max_len."
        if self.method == "grpo" and count(settings, "n_samples_per_prompt") < 2:
            yield "GRPO compares completions of a prompt: n_samples_per_prompt must be above 1."
        if table.truth(settings, "colocate_all"):
            if count(settings, "zero_stage") != 3:
                yield f"colocate_all offloads state, which requires ZeRO-3: zero_stage={count(settings, 'zero_stage')} must be 3."
            if count(settings, "vllm_tensor_parallel_size") > 1:
                yield f"colocate_all excludes vllm_tensor_parallel_size={count(settings, 'vllm_tensor_parallel_size')}."
            for name in ("actor_num_nodes", "ref_num_nodes", "vllm_num_engines"):
                if count(settings, name) != gpus:
                    yield f"colocate_all places one of each on every GPU: {name}={count(settings, name)} must be {gpus}."


TRAINERS = tuple(OpenReasonerZero("open-reasoner-zero", method) for method in ("grpo", "ppo"))

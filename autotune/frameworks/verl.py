"""verl: FSDP workers that generate and train by turns on the same GPUs.

Written for verl 0.9.1 (`workers/engine/fsdp/transformer_impl.py`, `utils/config.py`,
`workers/config`). Assumptions of the stand-in step:

- FSDP stores weights in `model_dtype`, gathers them in bfloat16 and reduces gradients in float32.
- The reference is on the host except for the running layer (`CPUOffload(offload_params=True)`).
- Log-probabilities: flash-attn's cross-entropy. Its gradient overwrites the logits, except with
  an entropy term.
- `param_offload` and `optimizer_offload` free memory during the rollout only: every step brings
  the state back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.core.candidate import KnobValue
from autotune.core.task import Task
from autotune.frameworks.base import Settings
from autotune.frameworks.stand_in import StandIn
from autotune.frameworks.stand_in_step import OtherModel, StandInSpec

ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
FSDP = f"{ACTOR}.fsdp_config"
ESTIMATORS = {"grpo": "grpo", "ppo": "gae"}
MOMENTS = 8
"""Bytes per weight of Adam's two moments in float32. Trained weights are float32 themselves."""

BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2}


class Verl(StandIn):
    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        found: dict[str, KnobValue] = {
            "algorithm.adv_estimator": ESTIMATORS[self.method],
            "trainer.n_gpus_per_node": task.hardware.count,
            f"{ROLLOUT}.name": "vllm",
            f"{MODEL}.lora_rank": self.lora_rank(settings, task),
        }
        total, each = task.workload.global_batch, self.table.count(settings, f"{ROLLOUT}.n")
        if total and each and total % each == 0:
            found[f"{ACTOR}.ppo_mini_batch_size"] = total // each
        if self.table.truth(settings, f"{ACTOR}.use_dynamic_bsz"):
            found[f"{ACTOR}.ppo_max_token_len_per_gpu"] = self.table.value(settings, f"{ACTOR}.ppo_max_token_len_per_gpu")
            return found
        micro = self._micro(settings, task)
        if micro and settings.get(f"{ROLLOUT}.log_prob_micro_batch_size") is None:
            found[f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"] = micro
        if micro and self.method == "ppo" and settings.get("critic.ppo_micro_batch_size") is None:
            found["critic.ppo_micro_batch_size_per_gpu"] = micro  # mandatory, and verl has no default
        return found

    def step(self, settings: Settings, task: Task) -> StandInSpec:
        table, count = self.table, self.table.count
        prompt, completion = self.lengths(settings)
        generations, ranks = count(settings, f"{ROLLOUT}.n"), task.hardware.count
        rows, tokens, score_tokens = self._batch(settings, task)
        sequence = self._sequence(settings)
        mini = count(settings, f"{ACTOR}.ppo_mini_batch_size") * generations * sequence // ranks
        entropy = table.share(settings, f"{ACTOR}.entropy_coeff") != 0 or table.truth(settings, f"{ACTOR}.calculate_entropy")
        second = table.text(settings, f"{ACTOR}.strategy") == "fsdp2"
        whole = BYTES.get(table.text(settings, f"{FSDP}.model_dtype"), 4)
        params, optimizer = (table.truth(settings, f"{FSDP}.{what}_offload") for what in ("param", "optimizer"))
        size = count(settings, f"{FSDP}.fsdp_size")
        return StandInSpec(
            prompt_length=prompt,
            completion_length=completion,
            tokens=tokens,
            score_tokens=score_tokens,
            micro_batch=rows,
            accumulation=max(1, mini // max(1, rows)),
            generation_batch=count(settings, "data.train_batch_size") * generations,
            packs_rows=self.table.truth(settings, f"{MODEL}.use_remove_padding"),
            ranks=ranks,
            sharded_by="fsdp2" if second and ranks > 1 else "fsdp1",
            options=self._options(settings, whole),
            shard_ranks=size if size > 0 else None,
            held_dtype="float32" if whole == 4 else "bfloat16",
            mixed=second and ranks > 1,
            adapter=self.adapter_settings(settings),
            loss="logprobs_kernel",
            loss_options={"in_place": not entropy, "entropy": entropy},
            score_options={"entropy": True},
            checkpointing=table.truth(settings, f"{MODEL}.enable_gradient_checkpointing"),
            clip=table.share(settings, f"{ACTOR}.grad_clip"),
            others=tuple(self._others(settings, task, policy_leaves=params and optimizer)),
            engine=self.engine_settings(settings),
            processes=2,
            offloaded_in_rollout=(*(("weights", "adapters") if params else ()), *(("optimizer",) if optimizer else ())),
            syncs_adapter_only=bool(self.adapter_settings(settings)) and not table.truth(settings, f"{MODEL}.lora.merge"),
            notes=tuple(self._notes(settings)),
        )

    def lengths(self, settings: Settings) -> tuple[int, int]:
        return self.table.count(settings, "data.max_prompt_length"), self.table.count(settings, "data.max_response_length")

    def _sequence(self, settings: Settings) -> int:
        """Return the GPUs that share one sequence."""
        return max(1, self.table.count(settings, f"{ACTOR}.ulysses_sequence_parallel_size"))

    def _batch(self, settings: Settings, task: Task) -> tuple[int, int, int]:
        """Return rows and tokens of a micro-batch on one GPU, and tokens of a scoring pass."""
        count = self.table.count
        longest = sum(self.lengths(settings))
        sequence = self._sequence(settings)
        here = task.hardware.count // sequence or 1
        generations = count(settings, f"{ROLLOUT}.n")
        if self.table.truth(settings, f"{ACTOR}.use_dynamic_bsz"):
            mini = -(-count(settings, f"{ACTOR}.ppo_mini_batch_size") * generations // here) * longest // sequence
            whole = -(-count(settings, "data.train_batch_size") * generations // here) * longest // sequence
            budget = min(count(settings, f"{ACTOR}.ppo_max_token_len_per_gpu"), mini)
            score = min(count(settings, f"{ROLLOUT}.log_prob_max_token_len_per_gpu"), whole)
            return max(1, budget * sequence // longest), max(1, budget), max(1, score)
        rows, score_rows = self._micro(settings, task) or 1, self._score_rows(settings, task) or 1
        return rows, -(-rows * longest // sequence), -(-score_rows * longest // sequence)

    def _micro(self, settings: Settings, task: Task) -> int:
        """Return the micro-batch per GPU. The older setting counts over all GPUs."""
        name = f"{ACTOR}.ppo_micro_batch_size"
        return self.table.count(settings, f"{name}_per_gpu") or self._over_all(settings, task, name)

    def _score_rows(self, settings: Settings, task: Task) -> int:
        """Return the larger scoring micro-batch of policy and reference."""
        names = (f"{ROLLOUT}.log_prob_micro_batch_size", f"{REF}.log_prob_micro_batch_size")
        return max(self.table.count(settings, f"{name}_per_gpu") or self._over_all(settings, task, name) for name in names)

    def _over_all(self, settings: Settings, task: Task, name: str) -> int:
        sequence = self._sequence(settings)
        return self.table.count(settings, name) // max(1, task.hardware.count // sequence)

    def _options(self, settings: Settings, master_bytes: int) -> Mapping[str, object]:
        cuts = self.table.truth(settings, f"{FSDP}.reshard_after_forward")
        strategy = {"sharding_strategy": "FULL_SHARD" if cuts else "SHARD_GRAD_OP"}
        units = {"units": "layers"} if self.table.text(settings, f"{ACTOR}.strategy") == "fsdp2" else {}  # `apply_fsdp2`
        widths = {"master_bytes": master_bytes, "frozen_master_bytes": master_bytes, "reduce_bytes": 4}
        return {**strategy, **units, **widths}

    def _others(self, settings: Settings, task: Task, *, policy_leaves: bool) -> Iterator[OtherModel]:
        """Yield the critic. The reference is on the host."""
        model = task.workload.model.name
        if self.method == "ppo":
            leaves = all(self.table.truth(settings, f"critic.fsdp.{what}_offload") for what in ("param", "optimizer"))
            whole = BYTES.get(self.table.text(settings, "critic.fsdp.model_dtype"), 4)
            yield OtherModel(
                role="critic",
                model=self.table.text(settings, "critic.model.path") if settings.get("critic.model.path") else model,
                dtype="float32" if whole == 4 else "bfloat16",
                trains=True,
                awake=() if leaves and policy_leaves else None,
                offloaded_bytes_per_weight=MOMENTS if leaves and policy_leaves else 0,
            )

    def with_one_row(self, settings: Settings) -> Mapping[str, KnobValue]:
        if not self.table.truth(settings, f"{MODEL}.use_remove_padding"):
            return {}
        if self.table.truth(settings, f"{ACTOR}.use_dynamic_bsz"):
            budget = -(-sum(self.lengths(settings)) // self._sequence(settings))
            return {f"{ACTOR}.ppo_max_token_len_per_gpu": budget, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": budget}
        names = (f"{ACTOR}.ppo_micro_batch_size", f"{ROLLOUT}.log_prob_micro_batch_size", f"{REF}.log_prob_micro_batch_size")
        return {f"{name}_per_gpu": 1 for name in names}

    def _notes(self, settings: Settings) -> Iterator[str]:
        yield f"modelled on verl {self.table.version}: trainer and vLLM are two processes on each GPU"
        yield "log-probabilities by flash-attn's cross-entropy, which verl uses if flash-attn is installed"
        if self.method == "ppo":
            yield "assumed: the critic is trained in full, with activations no larger than the policy's"
        if self._has_reference(settings) and not self.table.count(settings, f"{MODEL}.lora_rank"):
            yield "the reference is on the host, except for the running layer"

    def _has_reference(self, settings: Settings) -> bool:
        return self.table.truth(settings, f"{ACTOR}.use_kl_loss") or self.table.truth(settings, "algorithm.use_kl_in_reward")

    def rules(self, settings: Settings, task: Task) -> Iterator[str]:
        """Yield violations of the assertions in `utils/config.py` and `workers/config/actor.py`."""
        table, count = self.table, self.table.count
        gpus, prompts = task.hardware.count, count(settings, "data.train_batch_size")
        mini = count(settings, f"{ACTOR}.ppo_mini_batch_size")
        generations = count(settings, f"{ROLLOUT}.n")
        if task.workload.tuning == "qlora":
            yield "verl cannot train on quantised weights: use --tuning lora or full."
        else:
            yield from self.lora_refusals(settings, task)
        if self.method == "grpo" and generations < 2:
            yield f"{ROLLOUT}.n={generations} must be at least 2 to compare completions of a prompt: set --num-generations."
        parallel = count(settings, f"{ROLLOUT}.tensor_model_parallel_size") * max(
            1, count(settings, f"{ROLLOUT}.data_parallel_size")
        )
        if not parallel or gpus % parallel:
            split = count(settings, f"{ROLLOUT}.tensor_model_parallel_size")
            yield f"{gpus} GPUs are not divisible by {ROLLOUT}.tensor_model_parallel_size={split}."
        if count(settings, f"{ROLLOUT}.pipeline_model_parallel_size") > 1:
            yield f"{ROLLOUT}.pipeline_model_parallel_size is not supported with vLLM."
        if not mini or prompts < mini:
            yield f"data.train_batch_size={prompts} is less than {ACTOR}.ppo_mini_batch_size={mini}."
        sequence = count(settings, f"{ACTOR}.ulysses_sequence_parallel_size")
        if sequence < 1 or gpus % sequence:
            yield f"{gpus} GPUs are not divisible by {ACTOR}.ulysses_sequence_parallel_size={sequence}."
        if sequence > 1 and not table.truth(settings, f"{MODEL}.use_remove_padding"):
            yield f"{ACTOR}.ulysses_sequence_parallel_size={sequence} needs {MODEL}.use_remove_padding=true."
        yield from self._batch_refusals(settings, task, mini * generations * max(1, sequence) // gpus)

    def _batch_refusals(self, settings: Settings, task: Task, mini: int) -> Iterator[str]:
        """Yield broken batch rules; `mini` is the mini-batch of one GPU in completions."""
        table, count = self.table, self.table.count
        longest = sum(self.lengths(settings))
        if table.truth(settings, f"{ACTOR}.use_dynamic_bsz"):
            budget = count(settings, f"{ACTOR}.ppo_max_token_len_per_gpu")
            sequence = self._sequence(settings)
            if budget * sequence < longest:
                yield f"{ACTOR}.ppo_max_token_len_per_gpu={budget} is less than the longest sequence, {longest} tokens."
            return
        total = count(settings, "data.train_batch_size") * count(settings, f"{ROLLOUT}.n")
        if total % task.hardware.count:
            yield f"data.train_batch_size x {ROLLOUT}.n = {total} is not divisible by {task.hardware.count} GPUs."
        name = f"{ACTOR}.ppo_micro_batch_size"
        if settings.get(name) is not None and settings.get(f"{name}_per_gpu") is not None:
            yield f"{name} and {name}_per_gpu are both set: remove the former."
        micro = self._micro(settings, task)
        if not micro:
            yield f"{name}_per_gpu must be set, unless {ACTOR}.use_dynamic_bsz=true."
        elif not mini or mini % micro:
            yield f"a GPU's part of the mini-batch, {mini} completions, is not divisible by {name}_per_gpu={micro}."
        if micro and not self._score_rows(settings, task):
            yield f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu must be set, unless {ACTOR}.use_dynamic_bsz=true."


TRAINERS = (Verl("verl", "grpo"), Verl("verl", "ppo"))

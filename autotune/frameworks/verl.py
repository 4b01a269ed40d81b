"""verl: FSDP workers that generate and train by turns on the same GPUs.

Written for verl 0.9.1 (`workers/engine/fsdp/transformer_impl.py`, `utils/config.py`,
`workers/config`). Assumptions of the stand-in step:

- FSDP stores weights in `model_dtype`, gathers them in bfloat16 and reduces gradients in float32.
- The reference is on the host except for the running layer (`CPUOffload(offload_params=True)`).
- Log-probabilities: flash-attn's cross-entropy, whose gradient overwrites the logits without an entropy
  term; without flash-attn, a log-softmax of each token. torch.compile generates the entropy of
  packed rows, which stores no softmax. Rows that are not packed are copied out of the padded
  logits, their entropy is autocast to float32.
- With `use_fused_kernels` no logits exist (`worker/stand_in/losses.py`).
- Whole float32 tensors, or an adapter, are sent through a buffer. FSDP1's state dict copies all shards first
  (`get_per_tensor_param`); its adapters are read from the gathered model (`collect_lora_params`).
- `param_offload` and `optimizer_offload` free memory in the rollout only: a step brings the state back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.core.composition import SplitEngines
from autotune.core.job import Task
from autotune.core.space import KnobValue
from autotune.core.units import MIB
from autotune.frameworks.base import Settings
from autotune.frameworks.stand_in import StandIn
from autotune.frameworks.stand_in_step import OtherModel

ACTOR, ROLLOUT, REF, MODEL = (
    f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model")
)
FSDP, SEQUENCE = f"{ACTOR}.fsdp_config", f"{ACTOR}.ulysses_sequence_parallel_size"
BUCKET = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
TENSORS = f"{ROLLOUT}.tensor_model_parallel_size"
TRAINER_MODE, SEPARATE = "trainer.v1.trainer_mode", "trainer.v1.separate_async"
ESTIMATORS = {"grpo": "grpo", "ppo": "gae"}
MOMENTS = (
    8  # bytes per weight of Adam's two moments in float32; trained weights are float32 themselves
)
BYPASS = {
    "algorithm.rollout_correction.bypass_mode": True,
    f"{ACTOR}.use_kl_loss": False,
    "algorithm.use_kl_in_reward": False,
}
BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2}


class Verl(StandIn):
    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        found: dict[str, KnobValue] = {
            "algorithm.adv_estimator": ESTIMATORS[self.method],
            **self._placement(settings, task),
            f"{ROLLOUT}.name": "vllm",
            f"{MODEL}.lora_rank": self.lora_rank(settings, task),
        }
        if task.workload.global_batch and self._separate(settings):
            counted = (f"{ACTOR}.ppo_mini_batch_size", f"{SEPARATE}.parameter_sync_step")
            found["data.train_batch_size"] = math.prod(
                self.table.count(settings, name) for name in counted
            )
        if self.table.truth(settings, f"{ACTOR}.use_dynamic_bsz"):
            found[f"{ACTOR}.ppo_max_token_len_per_gpu"] = self.table.value(
                settings, f"{ACTOR}.ppo_max_token_len_per_gpu"
            )
            return found
        micro = self._rows(settings, task, f"{ACTOR}.ppo_micro_batch_size")
        if micro and settings.get(f"{ROLLOUT}.log_prob_micro_batch_size") is None:
            found[f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"] = micro
        if micro and self.method == "ppo" and settings.get("critic.ppo_micro_batch_size") is None:
            found["critic.ppo_micro_batch_size_per_gpu"] = (
                micro  # mandatory, and verl has no default
            )
        return found

    def _separate(self, settings: Settings) -> bool:
        return self.table.text(settings, TRAINER_MODE) == "separate_async"

    def _placement(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        """Return the GPUs that train, and those that generate where they are others."""
        gpus = task.hardware.count
        if not self._separate(settings):
            return {"trainer.n_gpus_per_node": gpus}
        name = f"{ROLLOUT}.n_gpus_per_node"
        serves = self.table.count(settings, name) if name in settings else max(1, gpus // 2)
        apart: dict[str, KnobValue] = {
            f"{ROLLOUT}.checkpoint_engine.backend": "nccl",
            "actor_rollout_ref.hybrid_engine": False,
        }
        return {
            "trainer.n_gpus_per_node": max(1, gpus - serves),
            name: serves,
            f"{ROLLOUT}.nnodes": 1,
            **apart,
        }

    def _ranks(self, settings: Settings, task: Task) -> int:
        """Return the GPUs that train."""
        return (
            self.table.count(settings, "trainer.n_gpus_per_node")
            if self._separate(settings)
            else task.hardware.count
        )

    def sizes(self, settings: Settings, task: Task) -> dict[str, int]:
        count, ranks, longest = (
            self.table.count,
            self._ranks(settings, task),
            sum(self.lengths(settings)) or 1,
        )
        sequence, generations = max(1, count(settings, SEQUENCE)), count(settings, f"{ROLLOUT}.n")
        prompts, mini_prompts = (
            count(settings, "data.train_batch_size"),
            count(settings, f"{ACTOR}.ppo_mini_batch_size"),
        )
        budget = count(settings, f"{ACTOR}.ppo_max_token_len_per_gpu")
        serves = self._split(settings).gpus if self._separate(settings) else ranks
        micro = self._rows(settings, task, f"{ACTOR}.ppo_micro_batch_size")
        scored = max(
            self._rows(settings, task, f"{part}.log_prob_micro_batch_size")
            for part in (ROLLOUT, REF)
        )
        if self.table.truth(settings, f"{ACTOR}.use_dynamic_bsz"):
            mini, whole = (
                -(-each * generations // (ranks // sequence or 1)) * longest // sequence
                for each in (mini_prompts, prompts)
            )
            tokens = max(1, min(budget, mini))
            score_tokens = max(
                1, min(count(settings, f"{ROLLOUT}.log_prob_max_token_len_per_gpu"), whole)
            )
            rows = max(1, min(budget, mini) * sequence // longest)
        else:
            rows = micro or 1
            tokens, score_tokens = (-(-each * longest // sequence) for each in (rows, scored or 1))
        mini = mini_prompts * generations * sequence // max(1, ranks)
        scores = not all(self.table.truth(settings, name) is on for name, on in BYPASS.items())
        return {
            "micro_batch": rows,
            "tokens": tokens,
            "score_tokens": score_tokens * scores,
            "accumulation": max(1, mini // rows),
            "generation_batch": prompts * generations,
            "ranks": ranks,
            "serves": serves,
            "uses": ranks + serves * self._separate(settings),
            "mini": mini,
            "micro": micro,
            "scored": scored,
            "between_syncs": mini_prompts * count(settings, f"{SEPARATE}.parameter_sync_step"),
            "sequence_budget": budget * sequence,
            "row_tokens": -(-longest // sequence),
            "engine_gpus": (
                count(settings, TENSORS) * max(1, count(settings, f"{ROLLOUT}.data_parallel_size"))
            ),
        }

    def composition(self, settings: Settings, task: Task) -> Mapping[str, Any]:
        table, ranks, separate = self.table, self._ranks(settings, task), self._separate(settings)
        second = table.text(settings, f"{ACTOR}.strategy") == "fsdp2"
        whole = BYTES.get(table.text(settings, f"{FSDP}.model_dtype"), 4)
        params, optimizer = (
            table.truth(settings, f"{FSDP}.{what}_offload") for what in ("param", "optimizer")
        )
        size, sharded_by = (
            table.count(settings, f"{FSDP}.fsdp_size"),
            "fsdp2" if second and ranks > 1 else "fsdp1",
        )
        return {
            "sharded_by": sharded_by,
            "options": {
                "sharding_strategy": (
                    "FULL_SHARD"
                    if table.truth(settings, f"{FSDP}.reshard_after_forward")
                    else "SHARD_GRAD_OP"
                ),
                **({"units": "layers"} if second else {}),  # `apply_fsdp2`
                "master_bytes": whole,
                "frozen_master_bytes": whole,
                "reduce_bytes": 4,
            },
            "shard_ranks": size if size > 0 else None,
            "held_dtype": "float32" if whole == 4 else "bfloat16",
            "mixed": second and ranks > 1,
            **self._losses(settings),
            "others": tuple(self._others(settings, task, policy_leaves=params and optimizer)),
            "generation": "server" if separate else "engine",
            "engine": None if separate else self.engine_settings(settings),
            "split": self._split(settings) if separate else None,
            "processes": 1 if separate else 2,
            "offloaded_in_rollout": (
                () if separate else (("weights", "adapters") * params + ("optimizer",) * optimizer)
            ),
            **self._sync(settings, sharded_by=sharded_by),
        }

    def _losses(self, settings: Settings) -> Mapping[str, Any]:
        """Return the loss and its options. Every scoring pass computes the entropy."""
        table, truth = self.table, self.table.truth
        if truth(settings, f"{MODEL}.use_fused_kernels"):
            triton = table.text(settings, f"{MODEL}.fused_kernel_options.impl_backend") == "triton"
            return {
                "loss": "logprobs_fused",
                "loss_options": {"head": "kernel" if triton else "tokens"},
            }
        packs = truth(settings, f"{MODEL}.use_remove_padding")
        kind = "compiled" if packs and truth(settings, f"{FSDP}.use_torch_compile") else "softmax"
        kernel = {
            "kernel_package": "flash_attn",
            "kernel_user": "verl",
            **({} if packs else {"copied": True}),
        }
        own: dict[str, Any] = {
            "entropy": kind,
            **({"entropy_widened": True} if kind == "softmax" else {}),
        }
        if packs and truth(settings, f"{ACTOR}.entropy_from_logits_with_chunking"):
            own["entropy_chunk"] = table.count(settings, f"{ACTOR}.entropy_from_logits_chunk_size")
        wanted = table.share(settings, f"{ACTOR}.entropy_coeff") != 0 or truth(
            settings, f"{ACTOR}.calculate_entropy"
        )
        return {
            "loss_options": {"in_place": not wanted, **kernel, **(own if wanted else {})},
            "score_options": own,
        }

    def _sync(self, settings: Settings, *, sharded_by: str) -> Mapping[str, Any]:
        """Return how weights are sent. NCCL's engine has a second buffer, to receive."""
        alone = bool(self.adapter_settings(settings)) and not self.table.truth(
            settings, f"{MODEL}.lora.merge"
        )
        summoned = "layer" if self.table.truth(settings, f"{ROLLOUT}.layered_summon") else "model"
        gathers = "parameter" if sharded_by == "fsdp2" else summoned if alone else "shards"
        size = (1 + self._separate(settings)) * self.table.count(settings, BUCKET) * MIB
        return {"sync_gathers": gathers, "sync_buffer_bytes": size, "syncs_adapter_only": alone}

    def _split(self, settings: Settings) -> SplitEngines:
        """Return the engines of `separate_async`. New weights interrupt them; what was generated
        is read again.
        """
        gpus = self.table.count(settings, f"{ROLLOUT}.nnodes") * self.table.count(
            settings, f"{ROLLOUT}.n_gpus_per_node"
        )
        ahead = self.table.share(settings, f"{SEPARATE}.num_warmup_batches")
        return self.engines_apart(
            settings, gpus, overlap="stream", at_sync="recompute", batches_ahead=ahead
        )

    def _rows(self, settings: Settings, task: Task, name: str) -> int:
        """Return a micro-batch per GPU. The older setting counts over all GPUs."""
        groups = self._ranks(settings, task) // max(1, self.table.count(settings, SEQUENCE))
        over_all = self.table.count(settings, name) // max(1, groups)
        return self.table.count(settings, f"{name}_per_gpu") or over_all

    def _others(
        self, settings: Settings, task: Task, *, policy_leaves: bool
    ) -> Iterator[OtherModel]:
        """Yield the critic. The reference is on the host."""
        if self.method == "ppo":
            leaves = all(
                self.table.truth(settings, f"critic.fsdp.{what}_offload")
                for what in ("param", "optimizer")
            )
            whole = BYTES.get(self.table.text(settings, "critic.fsdp.model_dtype"), 4)
            own = (
                self.table.text(settings, "critic.model.path")
                if settings.get("critic.model.path")
                else None
            )
            yield OtherModel(
                role="critic",
                model=own or task.workload.model.name,
                dtype="float32" if whole == 4 else "bfloat16",
                trains=True,
                awake=() if leaves and policy_leaves else None,
                offloaded_bytes_per_weight=MOMENTS if leaves and policy_leaves else 0,
            )


TRAINERS = (Verl("verl", "grpo"), Verl("verl", "ppo"))

"""SkyRL: FSDP2 workers on Ray and vLLM, on the same GPUs or on GPUs of their own.

Written for skyrl 0.3.0 (`backends/skyrl_train/workers`,
`backends/skyrl_train/distributed/fsdp_strategy.py`, `train/utils/utils.py`). Assumptions of the
stand-in step:

- Weights are stored in float32, frozen ones included, gathered in bfloat16 and reduced in float32.
- Moving a model to the meta device unties its output layer, which then has weights of its own.
- Policy and reference are processes of their own. The idle one is on the host, in colocated runs
  and with `colocate_policy_ref`.
- Log-probabilities: flash-attn's cross-entropy, whose gradient overwrites the logits. The entropy
  is computed in float32 chunks of `logprobs_chunk_size` tokens, with a gradient only if it is a
  loss.
- With an adapter, the adapter alone is sent to vLLM, and vLLM keeps the base weights on the host.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from autotune.core.job import Task
from autotune.core.space import Candidate, KnobValue
from autotune.frameworks.base import Settings
from autotune.frameworks.stand_in import StandIn, without_references
from autotune.frameworks.stand_in_step import OtherModel

POLICY, ENGINE, PLACEMENT = "trainer.policy", "generator.inference_engine", "trainer.placement"
MICRO, SCORED = "trainer.micro_train_batch_size_per_gpu", "trainer.micro_forward_batch_size_per_gpu"
BUDGET, PACKED = "trainer.max_tokens_per_microbatch", "trainer.remove_microbatch_padding"
ENGINE_SIZES = (
    "num_engines",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
)
STORED = {"units": "layers", "master_bytes": 4, "frozen_master_bytes": 4, "reduce_bytes": 4}
PLAIN = re.compile(r"[A-Za-z_/.][\w/.@+-]*", re.ASCII)


class SkyRl(StandIn):
    def as_path(self, path: str) -> str:
        """Quote a text for OmegaConf's command line: YAML, in which `${` begins a reference."""
        return (
            path
            if PLAIN.fullmatch(path)
            else json.dumps(without_references(path), ensure_ascii=False)
        )

    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        count, gpus = self.table.count, task.hardware.count
        parallel = max(1, count(settings, f"{ENGINE}.tensor_parallel_size"))
        together = self.table.truth(settings, f"{PLACEMENT}.colocate_all")
        engines = gpus // parallel if together else max(1, gpus // 2 // parallel)
        engines = (
            count(settings, f"{ENGINE}.num_engines")
            if f"{ENGINE}.num_engines" in settings
            else engines
        )
        trains = gpus if together else max(1, gpus - engines * parallel)
        return {
            "PYTORCH_CUDA_ALLOC_CONF": (
                f"expandable_segments:{self.table.truth(settings, 'trainer.use_expandable_segments')}"
            ),
            "trainer.algorithm.advantage_estimator": "grpo",
            f"{PLACEMENT}.policy_num_gpus_per_node": trains,
            f"{PLACEMENT}.ref_num_gpus_per_node": trains,
            f"{ENGINE}.num_engines": engines,
            f"{POLICY}.model.lora.rank": self.lora_rank(settings, task),
        }

    def sizes(self, settings: Settings, task: Task) -> dict[str, int]:
        count, longest = self.table.count, sum(self.lengths(settings))
        nodes, each = (
            count(settings, f"{PLACEMENT}.policy_num_{part}") for part in ("nodes", "gpus_per_node")
        )
        ranks, sequence = (
            max(1, nodes * each),
            max(1, count(settings, f"{POLICY}.sequence_parallel_size")),
        )
        generations = count(settings, "generator.n_samples_per_prompt")
        mini_prompts, rows = (
            count(settings, "trainer.policy_mini_batch_size"),
            count(settings, MICRO),
        )
        tokens, score_tokens = (
            -(-count(settings, name) * longest // sequence) for name in (MICRO, SCORED)
        )
        if (budget := count(settings, BUDGET)) > 0:  # a longer row is a micro-batch by itself
            tokens = score_tokens = -(-max(budget, longest) // sequence)
            rows = max(1, budget // max(1, longest))
        groups, serves = (
            max(1, ranks // sequence),
            math.prod(count(settings, f"{ENGINE}.{name}") for name in ENGINE_SIZES),
        )
        uses_reference = any(
            self.table.truth(settings, f"trainer.algorithm.use_kl_{kind}")
            for kind in ("loss", "in_reward")
        )
        return {
            "tokens": tokens,
            "score_tokens": score_tokens,
            "micro_batch": rows,
            "accumulation": max(1, mini_prompts * generations * sequence // ranks // max(1, rows)),
            "generation_batch": count(settings, "trainer.train_batch_size") * generations,
            "ranks": ranks,
            "serves": serves,
            "uses": ranks + serves,
            "mini": mini_prompts * generations // groups,
            "one_row": min(budget, longest),
            "references": (
                uses_reference and self.table.truth(settings, f"{PLACEMENT}.colocate_policy_ref")
            ),
        }

    def composition(self, settings: Settings, task: Task) -> Mapping[str, Any]:
        table, count, truth = self.table, self.table.count, self.table.truth
        together = truth(settings, f"{PLACEMENT}.colocate_all")
        sizes = self.sizes(settings, task)
        beside = bool(sizes["references"])
        states = (
            ("optimizer",)
            if truth(settings, f"{POLICY}.optimizer_config.offload_after_step")
            else ()
        )
        cuts, size = (
            table.value(settings, f"{POLICY}.fsdp_config.{name}")
            for name in ("reshard_after_forward", "fsdp_size")
        )
        return {
            "options": {**STORED, "reshard_after_forward": bool(cuts)},
            "shard_ranks": size if isinstance(size, int) and size > 0 else None,
            "loss_options": {
                "in_place": True,
                "entropy": "log_softmax",
                "entropy_chunk": count(settings, "trainer.logprobs_chunk_size"),
                "entropy_frozen": not truth(settings, "trainer.algorithm.use_entropy_loss"),
            },
            "score_options": {"entropy": None},
            "attention": "flash_attention_2" if truth(settings, "trainer.flash_attn") else "sdpa",
            # The dispatcher offloads the reference before the policy is loaded.
            "others": (
                (OtherModel(role="reference", model=task.workload.model.name, awake=()),)
                if beside
                else ()
            ),
            "generation": "engine" if together else "server",
            "engine": self.engine_settings(settings) if together else None,
            # Training waits for their completions.
            "split": None if together else self.engines_apart(settings, sizes["serves"]),
            "token_budget": count(settings, BUDGET) > 0,
            "processes": 1 + beside + together,
            "offloaded_in_rollout": ("weights", "adapters", *states) if together else (),
            "empties_rollout_cache": together,
            "syncs_adapter_only": self.adapter_settings(settings) is not None,
        }

    def trace_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        request: Mapping[str, Any] = super().trace_request(candidate, task)
        untied = {**request["model"]["config"], "tie_word_embeddings": False}
        return {**request, "model": {**request["model"], "config": untied}}


TRAINERS = (SkyRl("skyrl", "grpo"),)

"""NeMo-RL: DTensor workers (FSDP2 by Automodel) on Ray and vLLM, on the same GPUs or on GPUs of
their own.

Written for NeMo-RL 0.7.0 (`models/automodel/{setup,train,data}.py`,
`algorithms/{grpo,loss/utils}.py`, `distributed/model_utils.py`,
`models/policy/workers/dtensor_policy_worker_v2.py`) with Automodel at 6de0c361
(`components/distributed/parallelizer.py`). Assumptions of the stand-in step:

- Weights are loaded in float32, adapters too, gathered in bfloat16 and reduced in float32.
- The logits are cast to float32, and log-softmax keeps a second copy. With packed rows it is
  computed row by row, and each row's gradient has the size of all logits.
- Packed micro-batches are filled up to `train_mb_tokens` (`min_seq_len` in `models/automodel/data.py`).
- The reference's weights are on the host; its pass runs with them in the policy's place.
- For a rollout, weights and the optimizer's state are moved to the host. Weights are synchronised a
  tensor at a time, with the adapter merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.composition import SplitEngines
from autotune.core.job import Task
from autotune.core.space import KnobValue
from autotune.frameworks.base import Settings
from autotune.frameworks.stand_in import StandIn

DTENSOR, PACKING, DYNAMIC = (
    "policy.dtensor_cfg",
    "policy.sequence_packing",
    "policy.dynamic_batching",
)
ENGINE, PLACEMENT, LONGEST = (
    "policy.generation",
    "policy.generation.colocated",
    "policy.max_total_sequence_length",
)
BATCH, MICRO, SCORED = (
    f"policy.{name}"
    for name in ("train_global_batch_size", "train_micro_batch_size", "logprob_batch_size")
)
ASYNC = "grpo.async_grpo"
IN_FLIGHT = ("in_flight_weight_updates", "recompute_kv_cache_after_weight_updates")
STORED = {
    "units": "layers",
    "master_bytes": 4,
    "frozen_master_bytes": 4,
    "reduce_bytes": 4,
    "reshard_after_forward": True,
}


class NemoRl(StandIn):
    def argument(self, name: str, value: KnobValue) -> str:
        """Return an override in Hydra's grammar; `++` adds a setting that the configuration
        lacks.
        """
        return super().argument(name if name in self.table.fields else f"++{name}", value)

    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        count, gpus, rank = self.table.count, task.hardware.count, self.lora_rank(settings, task)
        found: dict[str, KnobValue] = {
            "cluster.gpus_per_node": gpus // max(1, count(settings, "cluster.num_nodes"))
        }
        if not self.table.truth(settings, f"{PLACEMENT}.enabled"):
            found[f"{PLACEMENT}.resources.gpus_per_node"] = max(1, gpus // 2)
        if rank:
            found |= {f"{DTENSOR}.lora_cfg.enabled": True, f"{DTENSOR}.lora_cfg.dim": rank}
        prompt, completion = (
            settings.get("data.max_input_seq_length"),
            settings.get(f"{ENGINE}.max_new_tokens"),
        )
        if isinstance(prompt, int) and isinstance(completion, int):
            found[LONGEST] = prompt + completion
        if self.table.truth(settings, f"{ASYNC}.enabled"):  # asserted by `async_grpo_train`
            found |= {
                "loss_fn.use_importance_sampling_correction": True,
                f"{ENGINE}.vllm_cfg.async_engine": True,
            }
        samples = count(settings, "grpo.num_prompts_per_step") * count(
            settings, "grpo.num_generations_per_prompt"
        )
        found[BATCH] = samples  # 512 by default, for 16 completions of 32 prompts
        return found

    def lengths(self, settings: Settings) -> tuple[int, int]:
        """Return the longest prompt and completion, which `policy.max_total_sequence_length`
        bounds together.
        """
        longest = self.table.count(settings, LONGEST)
        completion = min(self.table.count(settings, f"{ENGINE}.max_new_tokens"), longest)
        if completion >= longest:
            prompt = self.table.count(settings, "data.max_input_seq_length")
            completion = longest - prompt if 0 < prompt < longest else longest // 2
        return longest - completion, completion

    def sizes(self, settings: Settings, task: Task) -> dict[str, int]:
        count, truth, longest = self.table.count, self.table.truth, sum(self.lengths(settings))
        apart = not truth(settings, f"{PLACEMENT}.enabled")
        on_nodes, on_gpus = (
            count(settings, f"{PLACEMENT}.resources.{name}")
            for name in ("num_nodes", "gpus_per_node")
        )
        serves = max(1, on_nodes) * on_gpus if apart else 0
        gpus = count(settings, "cluster.num_nodes") * count(settings, "cluster.gpus_per_node")
        ranks, parallel = (
            max(1, gpus - serves),
            max(1, count(settings, f"{DTENSOR}.context_parallel_size")),
        )
        rows, batch = count(settings, MICRO), count(settings, BATCH)
        tokens, score_tokens = rows * longest, count(settings, SCORED) * longest
        by_tokens = next(
            (way for way in (PACKING, DYNAMIC) if truth(settings, f"{way}.enabled")), None
        )
        if by_tokens is not None:
            tokens = count(settings, f"{by_tokens}.train_mb_tokens") or tokens
            score_tokens = count(settings, f"{by_tokens}.logprob_mb_tokens") or score_tokens
            rows = max(1, tokens // max(1, longest))
        groups = max(1, ranks // parallel)
        return {
            "tokens": max(1, tokens // parallel),
            "score_tokens": max(1, score_tokens // parallel),
            "micro_batch": rows,
            "accumulation": max(1, batch // groups // max(1, rows)),
            "generation_batch": (
                count(settings, "grpo.num_prompts_per_step")
                * count(settings, "grpo.num_generations_per_prompt")
            ),
            "ranks": ranks,
            "serves": serves,
            "uses": gpus,
            "groups": groups,
            "budget": tokens,
            "own_batch": batch // groups,
            "engine_gpus": serves if apart else ranks,
        }

    def composition(self, settings: Settings, task: Task) -> Mapping[str, Any]:
        truth = self.table.truth
        packs, together = (truth(settings, f"{part}.enabled") for part in (PACKING, PLACEMENT))
        return {
            "options": STORED,
            "adapter": (
                self.adapter_settings(settings)
                if truth(settings, f"{DTENSOR}.lora_cfg.enabled")
                else None
            ),
            "loss_options": {"widened": True, "each_row": packs},
            "score_options": {"each_row": False},
            "attention": "flash_attention_2" if packs else "sdpa",
            "token_budget": packs or truth(settings, f"{DYNAMIC}.enabled"),
            "generation": "engine" if together else "server",
            "engine": self.engine_settings(settings) if together else None,
            "split": None if together else self._split(settings, task),
            "processes": 1 + together,
            "offloaded_in_rollout": ("weights", "adapters", "optimizer") if together else (),
            "empties_rollout_cache": together,
            "sync_parts": int(str(task.workload.model.config.get("num_hidden_layers") or 1)),
        }

    def _split(self, settings: Settings, task: Task) -> SplitEngines:
        """Return the engines. Asynchronous: completions are generated up to
        `max_trajectory_age_steps` steps ahead, and weights wait for their end unless they are
        updated in flight.
        """
        truth, ahead = (
            self.table.truth,
            self.table.count(settings, f"{ASYNC}.max_trajectory_age_steps"),
        )
        in_flight, again = (truth(settings, f"{ASYNC}.{name}") for name in IN_FLIGHT)
        return self.server(
            settings,
            task,
            self.sizes(settings, task)["serves"],
            batches_ahead=float(ahead),
            overlap="stream" if truth(settings, f"{ASYNC}.enabled") else "none",
            at_sync="drain" if not in_flight else "recompute" if again else "pause",
        )


TRAINERS = (NemoRl("nemo-rl", "grpo"),)

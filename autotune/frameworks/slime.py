"""slime: Megatron and SGLang on Ray, on the same GPUs or on GPUs of their own.

Written for slime 0.3.1 (`slime/utils/arguments.py`, `slime/ray/placement_group.py`,
`slime/backends/megatron_utils`). It is measured, not predicted: Megatron's layers, its distributed
optimizer and its parallelism have no counterpart in the stand-in step.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from autotune.core.errors import CannotPredict
from autotune.core.job import Task
from autotune.core.space import KnobValue
from autotune.frameworks.base import Settings
from autotune.frameworks.stand_in import StandIn

TENSOR, PIPELINE, CONTEXT = (
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context")
)


class Slime(StandIn):
    def argument(self, name: str, value: KnobValue) -> str:
        """Return an argparse option; a switch is present or absent, or has a `no` if it has a
        value of its own.
        """
        option = name.replace("_", "-")
        if isinstance(value, bool):
            own = "null" in self.table.fields[name].kinds
            return f"--{option}" if value else f"--no-{option}" if own else ""
        return f"--{option} {shlex.quote(str(value))}"

    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        table, gpus, config = self.table, task.hardware.count, task.workload.model.config
        apart = (
            0
            if table.truth(settings, "colocate")
            else table.count(settings, "rollout_num_gpus") or max(1, gpus // 2)
        )
        shape = {name: config.get(source) for name, source in self.facts.from_config.items()}
        rotary = config.get("rope_parameters")
        base = rotary.get("rope_theta") if isinstance(rotary, Mapping) else config.get("rope_theta")
        found: dict[str, KnobValue] = {
            **{name: value for name, value in shape.items() if isinstance(value, int | float)},
            **self.facts.fixed,
            **({"rollout_num_gpus": apart} if apart else {}),
            "rotary_base": round(base) if isinstance(base, int | float) else 10000,
            "add_qkv_bias": config.get("model_type") == "qwen2",
            "qk_layernorm": config.get("model_type") == "qwen3",
            "untie_embeddings_and_output_weights": config.get("tie_word_embeddings") is False,
            "sequence_parallel": table.count(settings, TENSOR) > 1,
            "advantage_estimator": "grpo",
            "rm_type": "random",
            "num_epoch": 1,
            "rollout_batch_size": 32,
            "actor_num_gpus_per_node": max(1, gpus - apart),
            "num_gpus_per_node": gpus,
        }
        if settings.get("recompute_granularity") == "full":
            found |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        if table.truth(settings, "optimizer_cpu_offload"):
            found |= {"overlap_cpu_optimizer_d2h_h2d": True, "use_precision_aware_optimizer": True}
        samples = table.count({**found, **settings}, "rollout_batch_size") * table.count(
            settings, "n_samples_per_prompt"
        )
        return {**found, "global_batch_size": samples}

    def sizes(self, settings: Settings, task: Task) -> dict[str, int]:
        count, config = self.table.count, task.workload.model.config
        parallel = max(
            1, count(settings, TENSOR) * count(settings, PIPELINE) * count(settings, CONTEXT)
        )
        ranks = max(
            1, count(settings, "actor_num_nodes") * count(settings, "actor_num_gpus_per_node")
        )
        together = self.table.truth(settings, "colocate")
        serves = count(settings, "rollout_num_gpus") or (ranks if together else 0)
        heads = int(str(config.get("num_attention_heads") or 1))
        return {
            "ranks": ranks,
            "serves": serves,
            "uses": max(ranks, serves) if together else ranks + serves,
            "parallel": parallel,
            "groups": max(1, ranks // parallel),
            "heads": heads,
            "cached_heads": int(str(config.get("num_key_value_heads") or heads)),
            "generation_batch": (
                count(settings, "rollout_batch_size") * count(settings, "n_samples_per_prompt")
            ),
            "below_rollout": (
                count(settings, "over_sampling_batch_size") < count(settings, "rollout_batch_size")
            ),
        }

    def composition(self, settings: Settings, task: Task) -> Mapping[str, Any]:
        raise CannotPredict(
            "slime trains with Megatron, whose memory is not predicted.",
            way_out="Measure it on the GPUs.",
        )


TRAINERS = (Slime("slime", "grpo"),)

"""OpenRLHF: one Ray actor per model, each a process with DeepSpeed, and vLLM on the same GPUs.

Written for openrlhf 0.11.2 (`cli/train_ppo_ray.py`, `models/actor.py`, `utils/deepspeed`).
Assumptions of the stand-in step:

- OpenRLHF leaves DeepSpeed's settings at `auto` and drops them, so that DeepSpeed's defaults apply.
- Logits are cast to float32 for flash-attn's cross-entropy, whose gradient has the same size.
- A frozen model is replicated on every GPU below ZeRO-3, and sharded with ZeRO-3.
- Policy and critic train concurrently, or by turns with `ds.enable_sleep`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.core.composition import SplitEngines
from autotune.core.job import Task
from autotune.core.space import KnobValue
from autotune.frameworks.base import Settings, count_of
from autotune.frameworks.stand_in import StandIn
from autotune.frameworks.stand_in_step import MASTER_AND_MOMENTS, OtherModel

ESTIMATORS = {"grpo": "group_norm", "ppo": "gae"}


class OpenRlhf(StandIn):
    def argument(self, name: str, value: KnobValue) -> str:
        """Return an argparse option; a switch is present or absent."""
        return (
            f"--{name}"
            if value is True
            else ""
            if value is False
            else f"--{name} {shlex.quote(str(value))}"
        )

    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        table, gpus = self.table, task.hardware.count
        parallel, engines = (
            max(1, table.count(settings, "vllm.tensor_parallel_size")),
            table.count(settings, "vllm.num_engines"),
        )
        trains = gpus
        if not self._together(settings):
            engines = engines or max(1, gpus // 2 // parallel)
            trains = max(1, gpus - engines * parallel)
        found: dict[str, KnobValue] = {
            "algo.advantage.estimator": ESTIMATORS[self.method],
            "actor.num_gpus_per_node": trains,
            "ref.num_gpus_per_node": trains,
            "vllm.num_engines": engines if trains < gpus else gpus // parallel,
            "ds.lora.rank": self.lora_rank(settings, task),
        }
        if task.workload.tuning == "qlora":
            found["ds.load_in_4bit"] = True
        if table.truth(settings, "train.dynamic_batch_enable"):
            found |= {
                "ds.packing_samples": True,
                "train.max_tokens_per_gpu": table.value(settings, "train.max_tokens_per_gpu"),
            }
        prompt, completion = (
            settings.get("max_prompt_length"),
            settings.get("rollout.max_new_tokens"),
        )
        if isinstance(prompt, int) and isinstance(completion, int):
            found["data.max_len"] = prompt + completion
        return found

    def lengths(self, settings: Settings) -> tuple[int, int]:
        """Return the longest prompt and completion, which `data.max_len` bounds together."""
        longest, given = (
            self.table.count(settings, "data.max_len"),
            self.table.count(settings, "rollout.max_new_tokens"),
        )
        prompt = settings.get("max_prompt_length")
        if isinstance(prompt, int):
            return min(prompt, longest - 1), longest - min(prompt, longest - 1)
        completion = min(given or longest // 2, longest - 1)
        return longest - completion, completion

    def sizes(self, settings: Settings, task: Task) -> dict[str, int]:
        count, longest = self.table.count, sum(self.lengths(settings))
        ranks = (
            task.hardware.count if self._together(settings) else max(1, self._policy_gpus(settings))
        )
        ring, whole = (
            max(1, count(settings, "ds.ring_attn_size")),
            count(settings, "train.batch_size"),
        )
        groups, budget = max(1, ranks // ring), count(settings, "train.max_tokens_per_gpu")
        rows, score_rows = (
            count(settings, "train.micro_batch_size"),
            count(settings, "rollout.micro_batch_size"),
        )
        per_pass = rows * groups
        tokens, score_tokens = (-(-each * longest // ring) for each in (rows, score_rows))
        if self.table.truth(settings, "train.dynamic_batch_enable"):
            row = -(-longest // ring)  # a row over the budget is a micro-batch of its own
            tokens = max(row, min(budget, -(-whole // groups) * longest // ring))
            score_tokens = max(row, count(settings, "rollout.max_tokens_per_gpu") or tokens)
            rows = max(1, tokens * ring // max(1, longest))
        samples = count(settings, "rollout.batch_size") * count(
            settings, "rollout.n_samples_per_prompt"
        )
        return {
            "tokens": tokens,
            "score_tokens": score_tokens,
            "micro_batch": rows,
            "accumulation": max(1, whole // max(1, rows * ranks)),
            "generation_batch": samples,
            "ranks": ranks,
            "groups": groups,
            "per_pass": per_pass,
            "score_passes": samples // max(1, score_rows),
            "row_tokens": -(-count(settings, "data.max_len") // ring),
            "longest_row": (
                count_of(settings, "max_prompt_length") + count(settings, "rollout.max_new_tokens")
            ),
            "policy": self._policy_gpus(settings),
            "serves": (
                serves := count(settings, "vllm.num_engines")
                * count(settings, "vllm.tensor_parallel_size")
            ),
            "uses": ranks + serves,
        }

    def composition(self, settings: Settings, task: Task) -> Mapping[str, Any]:
        table, truth = self.table, self.table.truth
        offloads, sleeps = (
            truth(settings, f"ds.{name}") for name in ("adam_offload", "enable_sleep")
        )
        stage, with_engine = table.count(settings, "ds.zero_stage"), self._together(settings)
        entropy = "softmax" if table.value(settings, "actor.entropy_coef") is not None else None
        others = tuple(self._others(settings, task, stage, offloads=offloads))
        options: dict[str, object] = {"offload_optimizer": {"device": "cpu"}} if offloads else {}
        return {
            "sharded_by": f"zero{stage}",
            "options": (
                {**options, "overlap_comm": True} if truth(settings, "ds.overlap_comm") else options
            ),
            "loss_options": {"widened": True, "entropy": entropy},
            "score_options": {"entropy": None},
            "others": others,
            "generation": "engine" if with_engine else "server",
            "engine": self.engine_settings(settings) if with_engine else None,
            "split": None if with_engine else self._split(settings),
            "processes": 1 + len(others) + with_engine,
            "offloaded_in_rollout": ("optimizer", "gradients") if sleeps and not offloads else (),
        }

    def _together(self, settings: Settings) -> bool:
        """Return True if vLLM shares the policy's GPUs: asynchronous runs colocate DeepSpeed's
        models alone.
        """
        return self.table.truth(settings, "train.colocate_all") and not self.table.truth(
            settings, "train.async_enable"
        )

    def _split(self, settings: Settings) -> SplitEngines | None:
        """Return vLLM on GPUs of its own. Asynchronous: the next batch is generated during
        training, and weights wait for its end; with partial rollouts generation pauses for them
        and goes on.
        """
        engines, parallel = (
            self.table.count(settings, f"vllm.{name}")
            for name in ("num_engines", "tensor_parallel_size")
        )
        if not engines:
            return None
        if not self.table.truth(settings, "train.async_enable"):
            return self.engines_apart(settings, engines * parallel)
        if not self.table.truth(settings, "train.partial_rollout_enable"):
            return self.engines_apart(settings, engines * parallel, overlap="batch")
        ahead = float(self.table.count(settings, "train.async_queue_size"))
        return self.engines_apart(
            settings, engines * parallel, overlap="stream", at_sync="pause", batches_ahead=ahead
        )

    def _policy_gpus(self, settings: Settings) -> int:
        return (self.table.count(settings, "actor.num_nodes") or 1) * self.table.count(
            settings, "actor.num_gpus_per_node"
        )

    def _others(
        self, settings: Settings, task: Task, stage: int, *, offloads: bool
    ) -> Iterator[OtherModel]:
        """Yield the models on the policy's devices: all with colocate_all, the reference with
        colocate_actor_ref.
        """
        table, model = self.table, task.workload.model.name
        together = table.truth(settings, "train.colocate_all")
        if table.share(settings, "algo.kl.init_coef") > 0 and (
            together or table.truth(settings, "train.colocate_actor_ref")
        ):
            away = table.truth(settings, "ref.offload") and stage == 3
            yield OtherModel(
                role="reference", model=model, whole=stage < 3, awake=() if away else None
            )
        if not together:
            return
        reward = table.text(settings, "reward.model_name_or_path").split(",")[0]
        if reward and not table.text(settings, "reward.remote_url"):
            away = table.truth(settings, "reward.offload") and stage == 3
            yield OtherModel(
                role="reward", model=reward, whole=stage < 3, awake=() if away else None
            )
        if self.method == "ppo":
            sleeps = table.truth(settings, "ds.enable_sleep")
            yield OtherModel(
                role="critic",
                model=table.text(settings, "critic.model_name_or_path") or reward or model,
                trains=True,
                state_bytes_per_weight=0 if offloads or sleeps else MASTER_AND_MOMENTS,
                offloaded_bytes_per_weight=MASTER_AND_MOMENTS if sleeps and not offloads else 0,
                trains_concurrently=not sleeps,
            )


TRAINERS = (OpenRlhf("openrlhf", "grpo"), OpenRlhf("openrlhf", "ppo"))

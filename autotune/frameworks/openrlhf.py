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

from autotune.core.candidate import KnobValue
from autotune.core.task import Task
from autotune.frameworks.base import Settings
from autotune.frameworks.stand_in import StandIn
from autotune.frameworks.stand_in_step import MASTER_AND_MOMENTS, OtherModel, StandInSpec

ESTIMATORS = {"grpo": "group_norm", "ppo": "gae"}
GROUPED = frozenset({"rloo", "reinforce_baseline", "group_norm", "dr_grpo"})
"""Estimators with the other completions of a prompt as baseline."""


class OpenRlhf(StandIn):
    def argument(self, name: str, value: KnobValue) -> str:
        """Return an argparse option; a switch is present or absent."""
        return f"--{name}" if value is True else "" if value is False else f"--{name} {shlex.quote(str(value))}"

    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        table, gpus = self.table, task.hardware.count
        found: dict[str, KnobValue] = {
            "algo.advantage.estimator": ESTIMATORS[self.method],
            "actor.num_gpus_per_node": gpus,
            "ref.num_gpus_per_node": gpus,
            "vllm.num_engines": gpus // max(1, table.count(settings, "vllm.tensor_parallel_size")),
            "ds.lora.rank": self.lora_rank(settings, task),
        }
        if task.workload.tuning == "qlora":
            found["ds.load_in_4bit"] = True
        if task.workload.global_batch:
            found["train.batch_size"] = task.workload.global_batch
        if table.truth(settings, "train.dynamic_batch_enable"):
            found |= {"ds.packing_samples": True, "train.max_tokens_per_gpu": table.value(settings, "train.max_tokens_per_gpu")}
        prompt, completion = settings.get("max_prompt_length"), settings.get("rollout.max_new_tokens")
        if isinstance(prompt, int) and isinstance(completion, int):
            found["data.max_len"] = prompt + completion
        return found

    def step(self, settings: Settings, task: Task) -> StandInSpec:
        table, count, truth = self.table, self.table.count, self.table.truth
        prompt, completion = self.lengths(settings)
        rows, tokens, score_tokens = self._batch(settings, task, prompt + completion)
        stage, offloads = count(settings, "ds.zero_stage"), truth(settings, "ds.adam_offload")
        with_engine = truth(settings, "train.colocate_all") and not truth(settings, "train.async_enable")
        engine = self.engine_settings(settings) if with_engine else None
        others = tuple(self._others(settings, task, stage, offloads=offloads))
        sleeps = truth(settings, "ds.enable_sleep")
        options: dict[str, object] = {"offload_optimizer": {"device": "cpu"}} if offloads else {}
        if truth(settings, "ds.overlap_comm"):
            options["overlap_comm"] = True
        return StandInSpec(
            prompt_length=prompt,
            completion_length=completion,
            tokens=tokens,
            score_tokens=score_tokens,
            micro_batch=rows,
            accumulation=max(1, count(settings, "train.batch_size") // max(1, rows * self._trains_on(settings, task))),
            generation_batch=count(settings, "rollout.batch_size") * count(settings, "rollout.n_samples_per_prompt"),
            packs_rows=truth(settings, "ds.packing_samples"),
            ranks=self._trains_on(settings, task),
            sharded_by=f"zero{stage}",
            options=options,
            adapter=self.adapter_settings(settings),
            quantised=truth(settings, "ds.load_in_4bit"),
            loss="logprobs_kernel",
            loss_options={"widened": True, "entropy": table.value(settings, "actor.entropy_coef") is not None},
            score_options={"entropy": False},
            checkpointing=truth(settings, "actor.gradient_checkpointing_enable"),
            reentrant=truth(settings, "actor.gradient_checkpointing_reentrant"),
            optimizer="adamw_torch_fused",
            clip=table.share(settings, "actor.max_norm"),
            attention=table.text(settings, "ds.attn_implementation"),
            others=others,
            generation="engine" if engine is not None else "server",
            engine=engine,
            processes=1 + len(others) + (engine is not None),
            offloaded_in_rollout=("optimizer", "gradients") if sleeps and not offloads else (),
            notes=tuple(self._notes(settings)),
        )

    def lengths(self, settings: Settings) -> tuple[int, int]:
        """Return the longest prompt and completion, which `data.max_len` bounds together."""
        longest, given = self.table.count(settings, "data.max_len"), self.table.count(settings, "rollout.max_new_tokens")
        prompt = settings.get("max_prompt_length")
        if isinstance(prompt, int):
            return min(prompt, longest - 1), longest - min(prompt, longest - 1)
        completion = min(given or longest // 2, longest - 1)
        return longest - completion, completion

    def _batch(self, settings: Settings, task: Task, longest: int) -> tuple[int, int, int]:
        count, ring = self.table.count, max(1, self.table.count(settings, "ds.ring_attn_size"))
        here = max(1, self._trains_on(settings, task) // ring)
        if self.table.truth(settings, "train.dynamic_batch_enable"):
            whole = -(-count(settings, "train.batch_size") // here) * longest // ring
            tokens = max(1, min(count(settings, "train.max_tokens_per_gpu"), whole))
            scored = count(settings, "rollout.max_tokens_per_gpu") or tokens
            return max(1, tokens * ring // longest), tokens, scored
        rows, score_rows = count(settings, "train.micro_batch_size"), count(settings, "rollout.micro_batch_size")
        return rows, -(-rows * longest // ring), -(-score_rows * longest // ring)

    def _trains_on(self, settings: Settings, task: Task) -> int:
        if self.table.truth(settings, "train.colocate_all"):
            return task.hardware.count
        nodes = self.table.count(settings, "actor.num_nodes") or 1
        return max(1, nodes * self.table.count(settings, "actor.num_gpus_per_node"))

    def _others(self, settings: Settings, task: Task, stage: int, *, offloads: bool) -> Iterator[OtherModel]:
        """Yield the models on the policy's devices: all with colocate_all, the reference with
        colocate_actor_ref."""
        table, model = self.table, task.workload.model.name
        together = table.truth(settings, "train.colocate_all")
        if self._has_reference(settings) and (together or table.truth(settings, "train.colocate_actor_ref")):
            away = table.truth(settings, "ref.offload") and stage == 3
            yield OtherModel(role="reference", model=model, whole=stage < 3, awake=() if away else None)
        if not together:
            return
        reward = table.text(settings, "reward.model_name_or_path").split(",")[0]
        if reward and not table.text(settings, "reward.remote_url"):
            away = table.truth(settings, "reward.offload") and stage == 3
            yield OtherModel(role="reward", model=reward, whole=stage < 3, awake=() if away else None)
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

    def _has_reference(self, settings: Settings) -> bool:
        return self.table.share(settings, "algo.kl.init_coef") > 0

    def with_one_row(self, settings: Settings) -> Mapping[str, KnobValue]:
        if not self.table.truth(settings, "ds.packing_samples"):
            return {}
        if self.table.truth(settings, "train.dynamic_batch_enable"):
            budget = -(-self.table.count(settings, "data.max_len") // max(1, self.table.count(settings, "ds.ring_attn_size")))
            return {"train.max_tokens_per_gpu": budget, "rollout.max_tokens_per_gpu": budget}
        return {"train.micro_batch_size": 1, "rollout.micro_batch_size": 1}

    def _notes(self, settings: Settings) -> Iterator[str]:
        yield f"modelled on openrlhf {self.table.version}: each model on a GPU is a process with its own CUDA context"
        yield "log-probabilities by flash-attn's cross-entropy over float32 logits, which needs flash-attn"
        if not self.table.truth(settings, "train.colocate_all"):
            yield "only the policy's GPUs are modelled, not those of vLLM, critic and rewards"
        elif not self.table.text(settings, "reward.model_name_or_path"):
            yield "rewards come from a function or a server, without memory on these GPUs"
        if self.method == "ppo" and self.table.truth(settings, "train.colocate_all"):
            turns = "trains by turns with" if self.table.truth(settings, "ds.enable_sleep") else "trains concurrently with"
            yield f"the critic {turns} the policy; assumed: its step needs no more memory than the policy's"

    def rules(self, settings: Settings, task: Task) -> Iterator[str]:
        """Yield violations of the assertions in `cli/train_ppo_ray.py`."""
        table, count, gpus = self.table, self.table.count, task.hardware.count
        yield from self.lora_refusals(settings, task)
        sizes = ("rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.micro_batch_size",
                 "train.batch_size", "train.micro_batch_size")  # fmt: skip
        for name in sizes:
            if count(settings, name) < 1:
                yield f"{name}={settings.get(name)} is not above zero."
                return
        estimator, generations = table.text(settings, "algo.advantage.estimator"), count(settings, "rollout.n_samples_per_prompt")
        if estimator in GROUPED and generations < 2:
            yield (
                f"{estimator} compares completions of one prompt: rollout.n_samples_per_prompt={generations} must be above 1, "
                "set --num-generations."
            )
        if (estimator == "gae") != (self.method == "ppo"):
            method = "ppo" if estimator == "gae" else "grpo"
            yield f"algo.advantage.estimator={estimator} does not belong to {self.method.upper()}: use --method {method}."
        if table.truth(settings, "train.colocate_all"):
            yield from self._colocation_refusals(settings, gpus)
        elif self._trains_on(settings, task) > gpus:
            trains_on = self._trains_on(settings, task)
            yield f"the policy requires {trains_on} GPUs, and the request is for {gpus}: set actor.num_gpus_per_node."
        longest = count(settings, "data.max_len")
        prompt, completion = settings.get("max_prompt_length"), settings.get("rollout.max_new_tokens")
        if isinstance(prompt, int) and isinstance(completion, int) and prompt + completion > longest:
            yield f"data.max_len={longest} is less than prompts of {prompt} and rollout.max_new_tokens={completion}."
        if count(settings, "rollout.max_new_tokens") >= longest:
            completion = count(settings, "rollout.max_new_tokens")
            yield f"data.max_len={longest} leaves no room for a prompt besides rollout.max_new_tokens={completion}."
        yield from self._batch_refusals(settings, task, longest)

    def _colocation_refusals(self, settings: Settings, gpus: int) -> Iterator[str]:
        engines, parallel = (self.table.count(settings, f"vllm.{name}") for name in ("num_engines", "tensor_parallel_size"))
        if engines * parallel != gpus:
            yield (
                f"with train.colocate_all, vllm.num_engines x vllm.tensor_parallel_size must be the {gpus} GPUs, "
                f"and is {engines} x {parallel}."
            )

    def _batch_refusals(self, settings: Settings, task: Task, longest: int) -> Iterator[str]:
        count, ranks = self.table.count, self._trains_on(settings, task)
        effective = max(1, ranks // max(1, count(settings, "ds.ring_attn_size")))
        samples = count(settings, "rollout.n_samples_per_prompt") * count(settings, "rollout.batch_size")
        score_rows = count(settings, "rollout.micro_batch_size")
        if samples // score_rows < effective:
            yield (
                f"{samples} completions in micro-batches of rollout.micro_batch_size={score_rows} "
                f"leave some of the {effective} GPUs idle."
            )
        if self.table.truth(settings, "train.dynamic_batch_enable"):
            budget = count(settings, "train.max_tokens_per_gpu")
            if budget * max(1, count(settings, "ds.ring_attn_size")) < longest:
                yield f"train.max_tokens_per_gpu={budget} is less than data.max_len={longest}."
            return
        whole, per_pass = count(settings, "train.batch_size"), count(settings, "train.micro_batch_size") * effective
        if whole % per_pass:
            yield f"train.batch_size={whole} is not divisible by train.micro_batch_size x {effective} GPUs = {per_pass}."


TRAINERS = (OpenRlhf("openrlhf", "grpo"), OpenRlhf("openrlhf", "ppo"))

"""OpenRLHF: one Ray actor per model, each a process with DeepSpeed, and vLLM beside them.

Read from openrlhf 0.11.2 (`cli/train_ppo_ray.py`, `models/actor.py`, `utils/deepspeed`). What stands in:

- DeepSpeed's settings are left at `auto`, which it drops: its own defaults hold.
- Logits are cast to float32, and go through flash-attn's cross-entropy, whose gradient is as large again.
- A frozen model is whole on every GPU below ZeRO-3, and cut with it.
- Policy and critic train at the same time unless `ds.enable_sleep` has them take turns.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import ClassVar

from autotune.candidate import KnobValue
from autotune.composition import EngineSettings
from autotune.trainers.base import Job
from autotune.trainers.generic import StandIn, made_up_prompts
from autotune.trainers.generic_step import MASTER_AND_MOMENTS, Other, Step
from autotune.trainers.launching import OUT, STEP_OF_DEEPSPEED, USE_OF_DEEPSPEED, Figures, Holder, ToldSettings, Watch

ESTIMATORS = {"grpo": "group_norm", "ppo": "gae"}
GROUPED = frozenset({"rloo", "reinforce_baseline", "group_norm", "dr_grpo"})
"""Estimators whose baseline is the rest of a prompt's completions."""

ENGINE_TOKENS, ENGINE_SEQUENCES = 2048, 128
"""vLLM's own for an `AsyncLLMEngine` (`DEFAULT_MAX_NUM_*` in vllm/config/scheduler.py): OpenRLHF says nothing."""

REWARD = """# For a probe: what a completion is worth does not matter, but that it differs.
import torch


def reward_func(queries, prompts, labels, **rest):
    rewards = torch.tensor([float(len(query) % 2) for query in queries])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
"""
RAY = "openrlhf.trainer.ray"
WATCH = Watch(
    steps=(STEP_OF_DEEPSPEED,),
    uses=(USE_OF_DEEPSPEED,),
    holders=(
        Holder(cls=f"{RAY}.ppo_actor:ActorPPOTrainer", models={"policy": "actor"}, optimizer="actor_optim"),
        Holder(cls=f"{RAY}.ppo_critic:CriticPPOTrainer", models={"critic": "critic"}, optimizer="critic_optim"),
        Holder(cls=f"{RAY}.launcher:ReferenceModelActor", models={"reference": "model"}),
        Holder(cls=f"{RAY}.launcher:RewardModelActor", models={"reward": "model"}),
    ),
)
Settings = Mapping[str, KnobValue]


class OpenRlhf(StandIn):
    name = "openrlhf"
    file = "openrlhf_fields.json"
    launcher = "python3 -m openrlhf.cli.train_ppo_ray"
    model_settings = ("actor.model_name_or_path",)
    needs = ("openrlhf",)
    requires: ClassVar[Mapping[str, str]] = {"openrlhf": "openrlhf>=0.11,<0.12"}
    watch = WATCH
    told_settings = ToldSettings(kind="namespace")  # printed after its own checks, which set some anew
    not_told = frozenset({"max_prompt_length"})
    canonical: Mapping[str, str] = {
        "max_prompt_length": "max_prompt_length",
        "max_completion_length": "rollout.max_new_tokens",
        "num_generations": "rollout.n_samples_per_prompt",
        "lora_r": "ds.lora.rank",
    }
    said_by: Mapping[str, tuple[str, ...]] = {"data.max_len": ("max_prompt_length", "rollout.max_new_tokens")}
    core = (
        "train.batch_size", "train.micro_batch_size", "train.dynamic_batch_enable", "train.colocate_all", "rollout.batch_size",
        "rollout.micro_batch_size", "rollout.n_samples_per_prompt", "data.max_len", "ds.zero_stage", "ds.adam_offload",
        "ds.packing_samples", "ds.enable_sleep", "actor.gradient_checkpointing_enable", "vllm.gpu_memory_utilization",
        "vllm.tensor_parallel_size", "vllm.enable_sleep", "algo.kl.init_coef",
    )  # fmt: skip

    def spelt(self, name: str, value: KnobValue) -> str:
        """argparse: switches are named or left out."""
        return f"--{name}" if value is True else "" if value is False else f"--{name} {shlex.quote(str(value))}"

    def bounded(self, settings: Settings, steps: int) -> dict[str, KnobValue]:
        """It knows no number of steps: one rollout's prompts are all there are, and are gone through so often."""
        return {
            "data.max_samples": self.table.count(settings, "rollout.batch_size"), "train.num_episodes": steps,
            "ckpt.output_dir": f"{OUT}/output", "ckpt.path": f"{OUT}/checkpoints",
        }  # fmt: skip

    def data(self, dataset: str) -> dict[str, KnobValue]:
        return {"data.prompt_dataset": dataset}

    def material(self, settings: Settings, job: Job) -> tuple[dict[str, KnobValue], dict[str, str]]:
        prompts = made_up_prompts(self.table.count(settings, "rollout.batch_size"), self._lengths(settings)[0])
        rows = [json.dumps({"input": prompt}) for prompt in prompts]
        files = {"reward.py": REWARD, "rows.jsonl": "\n".join(rows) + "\n"}
        named = self.data(job.workload.dataset or f"{OUT}/rows.jsonl")
        return {**named, "reward.remote_url": f"{OUT}/reward.py"}, files

    def figures(self, settings: Settings) -> Figures:
        return Figures(
            kind="python", line=r"Global step \d+: (?P<record>\{.*\})", keys={"seconds": ("timing/step_total",)},
            products={"tokens": ("rollout/response_length_mean", "rollout/num_samples")},
        )  # fmt: skip

    def derived(self, settings: Settings, job: Job) -> dict[str, KnobValue]:
        table, gpus = self.table, job.hardware.count
        found: dict[str, KnobValue] = {
            "algo.advantage.estimator": ESTIMATORS[self.method],
            "actor.num_gpus_per_node": gpus,
            "ref.num_gpus_per_node": gpus,
            "vllm.num_engines": gpus // max(1, table.count(settings, "vllm.tensor_parallel_size")),
            "ds.lora.rank": self.lora_rank(settings, job, "ds.lora.rank"),
        }
        if job.workload.tuning == "qlora":
            found["ds.load_in_4bit"] = True
        if job.workload.global_batch:
            found["train.batch_size"] = job.workload.global_batch
        if table.truth(settings, "train.dynamic_batch_enable"):
            found |= {"ds.packing_samples": True, "train.max_tokens_per_gpu": table.value(settings, "train.max_tokens_per_gpu")}
        prompt, completion = settings.get("max_prompt_length"), settings.get("rollout.max_new_tokens")
        if isinstance(prompt, int) and isinstance(completion, int):
            found["data.max_len"] = prompt + completion
        return found

    def step(self, settings: Settings, job: Job) -> Step:
        table, count, truth = self.table, self.table.count, self.table.truth
        prompt, completion = self._lengths(settings)
        rows, tokens, score_tokens = self._batch(settings, job, prompt + completion)
        stage, offloads = count(settings, "ds.zero_stage"), truth(settings, "ds.adam_offload")
        engine = self._engine(settings)
        others = tuple(self._others(settings, job, stage, offloads=offloads))
        sleeps = truth(settings, "ds.enable_sleep")
        options: dict[str, object] = {"offload_optimizer": {"device": "cpu"}} if offloads else {}
        if truth(settings, "ds.overlap_comm"):
            options["overlap_comm"] = True
        return Step(
            prompt=prompt,
            completion=completion,
            tokens=tokens,
            score_tokens=score_tokens,
            rows=rows,
            accumulation=max(1, count(settings, "train.batch_size") // max(1, rows * self._trains_on(settings, job))),
            generation_batch=count(settings, "rollout.batch_size") * count(settings, "rollout.n_samples_per_prompt"),
            ranks=self._trains_on(settings, job),
            sharding=f"zero{stage}",
            options=options,
            adapter=self._adapter(settings),
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
            away_in_rollout=("optimizer", "gradients") if sleeps and not offloads else (),
            notes=tuple(self._notes(settings)),
        )

    def _lengths(self, settings: Settings) -> tuple[int, int]:
        """`data.max_len` bounds both together; without a bound of its own a completion may take all but one token of it."""
        longest, given = self.table.count(settings, "data.max_len"), self.table.count(settings, "rollout.max_new_tokens")
        prompt = settings.get("max_prompt_length")
        if isinstance(prompt, int):
            return min(prompt, longest - 1), longest - min(prompt, longest - 1)
        completion = min(given or longest // 2, longest - 1)
        return longest - completion, completion

    def _batch(self, settings: Settings, job: Job, longest: int) -> tuple[int, int, int]:
        count, ring = self.table.count, max(1, self.table.count(settings, "ds.ring_attn_size"))
        here = max(1, self._trains_on(settings, job) // ring)
        if self.table.truth(settings, "train.dynamic_batch_enable"):
            whole = -(-count(settings, "train.batch_size") // here) * longest // ring
            tokens = max(1, min(count(settings, "train.max_tokens_per_gpu"), whole))
            scored = count(settings, "rollout.max_tokens_per_gpu") or tokens
            return max(1, tokens * ring // longest), tokens, scored
        rows, score_rows = count(settings, "train.micro_batch_size"), count(settings, "rollout.micro_batch_size")
        return rows, -(-rows * longest // ring), -(-score_rows * longest // ring)

    def _trains_on(self, settings: Settings, job: Job) -> int:
        if self.table.truth(settings, "train.colocate_all"):
            return job.hardware.count
        nodes = self.table.count(settings, "actor.num_nodes") or 1
        return max(1, nodes * self.table.count(settings, "actor.num_gpus_per_node"))

    def _adapter(self, settings: Settings) -> Mapping[str, object] | None:
        rank = self.table.count(settings, "ds.lora.rank")
        if not rank:
            return None
        alpha = self.table.count(settings, "ds.lora.alpha")
        return {"lora_r": rank, "lora_alpha": alpha, "lora_target_modules": self.table.text(settings, "ds.lora.target_modules")}

    def _others(self, settings: Settings, job: Job, stage: int, *, offloads: bool) -> Iterator[Other]:
        """On the policy's devices: all under colocate_all, the reference under colocate_actor_ref."""
        table, model = self.table, job.workload.model.name
        together = table.truth(settings, "train.colocate_all")
        if self._has_reference(settings) and (together or table.truth(settings, "train.colocate_actor_ref")):
            away = table.truth(settings, "ref.offload") and stage == 3
            yield Other(role="reference", model=model, whole=stage < 3, awake=() if away else None)
        if not together:
            return
        reward = table.text(settings, "reward.model_name_or_path").split(",")[0]
        if reward and not table.text(settings, "reward.remote_url"):
            away = table.truth(settings, "reward.offload") and stage == 3
            yield Other(role="reward", model=reward, whole=stage < 3, awake=() if away else None)
        if self.method == "ppo":
            sleeps = table.truth(settings, "ds.enable_sleep")
            yield Other(
                role="critic",
                model=table.text(settings, "critic.model_name_or_path") or reward or model,
                trains=True,
                state_bytes_per_weight=0 if offloads or sleeps else MASTER_AND_MOMENTS,
                turn_bytes_per_weight=MASTER_AND_MOMENTS if sleeps and not offloads else 0,
                trains_along=not sleeps,
            )

    def _has_reference(self, settings: Settings) -> bool:
        return self.table.share(settings, "algo.kl.init_coef") > 0

    def _engine(self, settings: Settings) -> EngineSettings | None:
        table = self.table
        if not table.truth(settings, "train.colocate_all") or table.truth(settings, "train.async_enable"):
            return None
        return EngineSettings(
            utilization=table.share(settings, "vllm.gpu_memory_utilization"),
            max_model_length=table.count(settings, "data.max_len"),
            max_num_seqs=ENGINE_SEQUENCES,
            tensor_parallel=table.count(settings, "vllm.tensor_parallel_size") or 1,
            sleep=table.truth(settings, "vllm.enable_sleep"),
            eager=table.truth(settings, "vllm.enforce_eager"),
            max_num_batched_tokens=ENGINE_TOKENS,
            apart=True,
        )

    def with_one_row(self, settings: Settings) -> dict[str, KnobValue] | None:
        if not self.table.truth(settings, "ds.packing_samples"):
            return None
        if self.table.truth(settings, "train.dynamic_batch_enable"):
            budget = -(-self.table.count(settings, "data.max_len") // max(1, self.table.count(settings, "ds.ring_attn_size")))
            least: dict[str, KnobValue] = {"train.max_tokens_per_gpu": budget, "rollout.max_tokens_per_gpu": budget}
        else:
            least = {"train.micro_batch_size": 1, "rollout.micro_batch_size": 1}
        return None if all(settings.get(name) == value for name, value in least.items()) else {**settings, **least}

    def _notes(self, settings: Settings) -> Iterator[str]:
        yield f"written after openrlhf {self.table.version}: each model on a GPU is a process with a context of its own"
        yield "log-probabilities by flash-attn's cross-entropy over float32 logits, as OpenRLHF takes them where it is installed"
        if not self.table.truth(settings, "train.colocate_all"):
            yield "the GPUs are the policy's: what runs on others (vLLM, critic, rewards) is not looked at"
        elif not self.table.text(settings, "reward.model_name_or_path"):
            yield "rewards come from a function or a server, which takes none of these GPUs"
        if self.method == "ppo" and self.table.truth(settings, "train.colocate_all"):
            turns = "takes turns with" if self.table.truth(settings, "ds.enable_sleep") else "trains at the same time as"
            yield f"the critic {turns} the policy, and takes no more for a step than it does"

    def not_followed(self, settings: Settings) -> Iterator[str]:
        for name in ("ds.use_liger_kernel", "ds.deepcompile", "train.enable_ema"):
            if settings.get(name):
                yield f"{name}=true changes what a step holds"
        if self.table.count(settings, "ds.tensor_parallel_size") > 1:
            yield "ds.tensor_parallel_size above 1 splits every layer"
        for which in ("actor", "critic"):
            if settings.get(f"{which}.optim") not in (None, "adam"):
                yield f"{which}.optim={settings[f'{which}.optim']} keeps another state than Adam's"
        if settings.get("ds.zero_stage") == 0:
            yield "ds.zero_stage=0 keeps gradients and masters in another way"

    def refusals(self, settings: Settings, job: Job) -> Iterator[str]:
        """As `cli/train_ppo_ray.py` asserts them."""
        table, count, gpus = self.table, self.table.count, job.hardware.count
        rank = count(settings, "ds.lora.rank")
        if job.workload.tuning == "full" and rank:
            yield f"ds.lora.rank={rank} trains an adapter, and the tuning is full: add --tuning lora."
        if job.workload.tuning != "full" and not rank:
            yield "ds.lora.rank=0 trains all weights, and the tuning is LoRA: add --tuning full."
        for name in (
            "rollout.batch_size",
            "rollout.n_samples_per_prompt",
            "rollout.micro_batch_size",
            "train.batch_size",
            "train.micro_batch_size",
        ):
            if count(settings, name) < 1:
                yield f"{name}={settings.get(name)} is not above zero."
                return
        estimator, generations = table.text(settings, "algo.advantage.estimator"), count(settings, "rollout.n_samples_per_prompt")
        if estimator in GROUPED and generations < 2:
            yield (
                f"{estimator} compares completions of one prompt: rollout.n_samples_per_prompt={generations} must be above 1, "
                "give --num-generations."
            )
        if (estimator == "gae") != (self.method == "ppo"):
            method = "ppo" if estimator == "gae" else "grpo"
            yield f"algo.advantage.estimator={estimator} is not {self.method.upper()}'s: type --method {method}."
        if table.truth(settings, "train.colocate_all"):
            yield from self._colocation_refusals(settings, gpus)
        elif self._trains_on(settings, job) > gpus:
            trains_on = self._trains_on(settings, job)
            yield f"the policy trains on {trains_on} GPUs, and there are {gpus}: set actor.num_gpus_per_node."
        longest = count(settings, "data.max_len")
        prompt, completion = settings.get("max_prompt_length"), settings.get("rollout.max_new_tokens")
        if isinstance(prompt, int) and isinstance(completion, int) and prompt + completion > longest:
            yield f"data.max_len={longest} is less than prompts of {prompt} and rollout.max_new_tokens={completion}."
        if count(settings, "rollout.max_new_tokens") >= longest:
            completion = count(settings, "rollout.max_new_tokens")
            yield f"data.max_len={longest} leaves no room for a prompt beside rollout.max_new_tokens={completion}."
        yield from self._batch_refusals(settings, job, longest)

    def _colocation_refusals(self, settings: Settings, gpus: int) -> Iterator[str]:
        engines, parallel = (self.table.count(settings, f"vllm.{name}") for name in ("num_engines", "tensor_parallel_size"))
        if engines * parallel != gpus:
            yield (
                f"under train.colocate_all vllm.num_engines x vllm.tensor_parallel_size must be the {gpus} GPUs, "
                f"and is {engines} x {parallel}."
            )

    def _batch_refusals(self, settings: Settings, job: Job, longest: int) -> Iterator[str]:
        count, ranks = self.table.count, self._trains_on(settings, job)
        effective = max(1, ranks // max(1, count(settings, "ds.ring_attn_size")))
        samples = count(settings, "rollout.n_samples_per_prompt") * count(settings, "rollout.batch_size")
        score_rows = count(settings, "rollout.micro_batch_size")
        if samples // score_rows < effective:
            yield (
                f"{samples} completions in micro-batches of rollout.micro_batch_size={score_rows} "
                f"leave some of the {effective} GPUs without any."
            )
        if self.table.truth(settings, "train.dynamic_batch_enable"):
            budget = count(settings, "train.max_tokens_per_gpu")
            if budget * max(1, count(settings, "ds.ring_attn_size")) < longest:
                yield f"train.max_tokens_per_gpu={budget} is less than data.max_len={longest}."
            return
        whole, per_pass = count(settings, "train.batch_size"), count(settings, "train.micro_batch_size") * effective
        if whole % per_pass:
            yield f"train.batch_size={whole} is not divisible by train.micro_batch_size x {effective} GPUs = {per_pass}."


TRAINERS = (OpenRlhf("grpo"), OpenRlhf("ppo"))

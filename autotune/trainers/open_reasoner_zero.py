"""Open-Reasoner-Zero: PPO on packed rows with DeepSpeed, every model a Ray actor, the state moved to the host between turns.

Read from its repository at 3fdd9a07b4 (`orz/ppo/{trainer,actors,models,utils}.py`, `playground/orz_7b_ppo.py`). What stands in:

- DeepSpeed's settings are left at `auto`, which it drops: its own defaults hold.
- Log-softmax of all logits in bfloat16, and its entropy in chunks that take little.
- Under `colocate_all` the optimizer's states and gradients of policy and critic take turns on the device with vLLM, and their
  bfloat16 weights stay, as the reference's do.
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

ENGINE_TOKENS = 2048
"""vLLM's `max_num_batched_tokens` without chunked prefill is the longest sequence where that is more than this."""

INSTRUCTIONS = 192
"""Tokens of the words that its experiments put around a prompt, and more."""

ACTORS = (("policy", "Policy"), ("critic", "Critic"), ("reference", "Ref"), ("reward", "Reward"))
WATCH = Watch(
    steps=(STEP_OF_DEEPSPEED,),
    uses=(USE_OF_DEEPSPEED,),
    holders=tuple(
        Holder(cls=f"orz.ppo.actors:{which}RayActorBase", models={role: "model"}, optimizer="optimizer") for role, which in ACTORS
    ),
)
Settings = Mapping[str, KnobValue]


class OpenReasonerZero(StandIn):
    name = "open-reasoner-zero"
    file = "open_reasoner_zero_fields.json"
    launcher = "python -m playground.orz_7b_ppo"
    model_settings = ("pretrain",)
    needs = ("orz",)
    requires: ClassVar[Mapping[str, str]] = {"orz": "git+https://github.com/Open-Reasoner-Zero/Open-Reasoner-Zero"}
    watch = WATCH
    told_settings = ToldSettings(kind="table")  # of the experiment, with what was typed
    phases = (  # it prints where a phase has ended
        (r"Generate sequences via vllm engines, time cost", "score"),
        (r"Inference and calculate values, log probs, rewards, kl divergence, time cost", None),
        (r"Broadcast actor weights to vllm engines, time cost", "rollout"),
    )
    canonical: Mapping[str, str] = {
        "max_prompt_length": "prompt_max_len",
        "max_completion_length": "generate_max_len",
        "num_generations": "n_samples_per_prompt",
        "lora_r": "lora_r",
    }
    core = (
        "rollout_batch_size", "n_samples_per_prompt", "policy_update_steps", "prompt_max_len", "generate_max_len",
        "packing_max_len", "micro_rollout_batch_size", "gpu_memory_utilization", "zero_stage", "adam_offload",
        "gradient_checkpointing", "flash_attn", "colocate_all", "ref_reward_offload",
    )  # fmt: skip

    def spelt(self, name: str, value: KnobValue) -> str:
        return f"exp.{name}={shlex.quote(str(value))}"

    def bounded(self, settings: Settings, steps: int) -> dict[str, KnobValue]:
        """It has no number of steps, and is ended once enough was seen; it saves whenever the interval divides the step."""
        elsewhere = {name: f"{OUT}/{name}" for name in ("save_path", "ckpt_path", "tensorboard_log_dir")}
        return {"num_episodes": steps, "enable_eval": False, "save_interval": 10**9, **elsewhere}

    def data(self, dataset: str) -> dict[str, KnobValue]:
        return {"prompt_data": f"[{dataset}]"}

    def material(self, settings: Settings, job: Job) -> tuple[dict[str, KnobValue], dict[str, str]]:
        """Its reward belongs to the experiment: it compares answers."""
        count = self.table.count
        prompts = made_up_prompts(count(settings, "rollout_batch_size"), count(settings, "prompt_max_len") - INSTRUCTIONS)
        rows = [[{"value": prompt}, {"ground_truth": {"value": "0"}}] for prompt in prompts]
        return self.data(job.workload.dataset or f"{OUT}/rows.json"), {"rows.json": json.dumps(rows)}

    def figures(self, settings: Settings) -> Figures:
        """It prints the mean length of every batch of completions, and no seconds: those are from one to the next."""
        rows = self.table.count(settings, "rollout_batch_size") * self.table.count(settings, "n_samples_per_prompt")
        return Figures(kind="pattern", line=r"avg_response_length: (?P<tokens>[\d.]+)", times=rows)

    def derived(self, settings: Settings, job: Job) -> dict[str, KnobValue]:
        gpus = job.hardware.count
        each = ("total_num_nodes", "actor_num_nodes", "ref_num_nodes", "vllm_num_engines")
        found: dict[str, KnobValue] = dict.fromkeys(each, gpus)
        if self.method == "ppo":
            found["critic_num_nodes"] = gpus
        found["use_grpo"] = self.method == "grpo"
        # Its own default is the experiment's 7B, whatever `pretrain` says, and a critic is loaded wherever one is named.
        found["critic_pretrain"] = _told_as(job) if self.method == "ppo" else ""
        lengths = sum(self.table.count(settings, name) for name in ("prompt_max_len", "generate_max_len"))
        if {"prompt_max_len", "generate_max_len"} & set(settings):
            found["packing_max_len"] = max(lengths, self.table.count(settings, "packing_max_len"))
            found["max_len"] = lengths
        return found

    def step(self, settings: Settings, job: Job) -> Step:
        table, count, truth = self.table, self.table.count, self.table.truth
        prompt, completion = count(settings, "prompt_max_len"), count(settings, "generate_max_len")
        budget, stage, gpus = count(settings, "packing_max_len"), count(settings, "zero_stage"), job.hardware.count
        samples = count(settings, "rollout_batch_size") * count(settings, "n_samples_per_prompt")
        packs = max(1, samples * (prompt + completion) // max(1, budget * gpus))
        together = truth(settings, "colocate_all")
        engine = self._engine(settings, prompt + completion) if together else None
        others = tuple(self._others(settings, job, stage, together=together))
        return Step(
            prompt=prompt,
            completion=completion,
            tokens=budget,
            score_tokens=budget,
            rows=max(1, budget // (prompt + completion)),
            accumulation=max(1, packs // max(1, count(settings, "policy_update_steps"))),
            generation_batch=samples,
            ranks=gpus,
            sharding=f"zero{stage}",
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
            away_in_rollout=("gradients", "optimizer") if together else (),
            notes=tuple(self._notes(settings)),
        )

    def _others(self, settings: Settings, job: Job, stage: int, *, together: bool) -> Iterator[Other]:
        table, model = self.table, job.workload.model.name
        away: tuple[()] | None = () if table.truth(settings, "ref_reward_offload") and stage == 3 else None
        if together or table.truth(settings, "colocate_actor_ref"):
            yield Other(role="reference", model=model, whole=stage < 3, awake=away)
        if not together:
            return
        critic = table.text(settings, "critic_pretrain")
        if critic:
            yield Other(
                role="critic",
                model=model if critic == _told_as(job) else critic,
                trains=True,
                state_bytes_per_weight=0,
                turn_bytes_per_weight=0 if table.truth(settings, "adam_offload") else MASTER_AND_MOMENTS,
            )
        reward = table.text(settings, "reward_pretrain").split(",")[0]
        if reward:
            yield Other(role="reward", model=reward, whole=stage < 3, awake=away)

    def _engine(self, settings: Settings, longest: int) -> EngineSettings:
        chunks = self.table.truth(settings, "enable_chunked_prefill")
        return EngineSettings(
            utilization=self.table.share(settings, "gpu_memory_utilization"),
            max_model_length=self.table.count(settings, "max_len") or longest,
            max_num_seqs=self.table.count(settings, "micro_rollout_batch_size"),
            tensor_parallel=self.table.count(settings, "vllm_tensor_parallel_size") or 1,
            sleep=True,
            eager=True,
            wakes_whole=True,  # `load_gpu` in vllm_worker_wrap.py makes its cache anew before weights are broadcast
            max_num_batched_tokens=self.table.count(settings, "max_num_batched_tokens")
            if chunks
            else max(ENGINE_TOKENS, longest),
            apart=True,
        )

    def with_one_row(self, settings: Settings) -> dict[str, KnobValue] | None:
        longest = sum(self.table.count(settings, name) for name in ("prompt_max_len", "generate_max_len"))
        return None if self.table.count(settings, "packing_max_len") <= longest else {**settings, "packing_max_len": longest}

    def _notes(self, settings: Settings) -> Iterator[str]:
        yield f"written after Open-Reasoner-Zero at {self.table.version}: each model on a GPU is a process of its own"
        yield "vLLM without captured graphs, as under colocate_all; its weights and cache are given back while models train"
        if not self.table.truth(settings, "colocate_all"):
            yield "the GPUs are the policy's: what runs on others (vLLM, critic, rewards) is not looked at"
        elif self.table.text(settings, "critic_pretrain"):
            yield "policy and critic take turns: the one that is not trained keeps its bfloat16 weights there and nothing else"

    def not_followed(self, settings: Settings) -> Iterator[str]:
        if settings.get("zero_stage") == 0:
            yield "zero_stage=0 keeps gradients and masters in another way"
        if settings.get("bf16") is False:
            yield "bf16=false loads the model in whatever precision its file has"

    def refusals(self, settings: Settings, job: Job) -> Iterator[str]:
        """As `_validate_args` in orz/ppo/utils.py, `create_vllm_engines` and `build_models` assert them."""
        table, count, gpus = self.table, self.table.count, job.hardware.count
        if job.workload.tuning != "full":
            yield "Open-Reasoner-Zero trains all weights: give --tuning full."
        for name in ("rollout_batch_size", "n_samples_per_prompt", "micro_rollout_batch_size", "policy_update_steps"):
            if count(settings, name) < 1:
                yield f"{name}={settings.get(name)} is not above zero."
        budget, longest = (
            count(settings, "packing_max_len"),
            count(settings, "prompt_max_len") + count(settings, "generate_max_len"),
        )
        if budget < longest:
            yield f"packing_max_len={budget} is less than prompt_max_len + generate_max_len = {longest}."
        for name in ("micro_train_batch_size", "micro_forward_batch_size"):
            if count(settings, name) != 1:
                yield f"{name}={count(settings, name)} must be 1, because rows are packed: change packing_max_len."
        if self.method == "grpo" and count(settings, "n_samples_per_prompt") < 2:
            yield "GRPO compares completions of one prompt: n_samples_per_prompt must be above 1."
        if table.truth(settings, "colocate_all"):
            if count(settings, "zero_stage") != 3:
                yield f"colocate_all moves state as only ZeRO-3 can: zero_stage={count(settings, 'zero_stage')} must be 3."
            if count(settings, "vllm_tensor_parallel_size") > 1:
                yield f"colocate_all excludes vllm_tensor_parallel_size={count(settings, 'vllm_tensor_parallel_size')}."
            for name in ("actor_num_nodes", "ref_num_nodes", "vllm_num_engines"):
                if count(settings, name) != gpus:
                    yield f"colocate_all puts one of each on every GPU: {name}={count(settings, name)} must be {gpus}."


def _told_as(job: Job) -> str:
    """The model, as the command line has it."""
    return str(job.workload.model.folder or job.workload.model.name)


TRAINERS = (OpenReasonerZero("grpo"), OpenReasonerZero("ppo"))

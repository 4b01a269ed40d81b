"""verl: FSDP workers that train and write completions in turn, all on the same GPUs.

Read from verl 0.9.1 (`workers/engine/fsdp/transformer_impl.py`, `utils/config.py`, `workers/config`). What stands in:

- Weights are kept in `model_dtype`, cut by FSDP, gathered in bfloat16 and reduced in float32.
- The reference is on the host but for the layer that runs (`CPUOffload(offload_params=True)` for what only goes forward).
- Log-probabilities come from flash-attn's cross-entropy, whose gradient is written over the logits unless entropies are wanted.
- `param_offload` and `optimizer_offload` bring the state back for every step: they make room for the rollout alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import ClassVar

from autotune.candidate import KnobValue
from autotune.composition import EngineSettings
from autotune.trainers.base import Job
from autotune.trainers.generic import StandIn, made_up_prompts
from autotune.trainers.generic_step import Other, Step
from autotune.trainers.launching import OUT, Figures, Holder, ToldSettings, Watch

ACTOR, ROLLOUT, REF, MODEL = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.model",
)
FSDP = f"{ACTOR}.fsdp_config"
HYDRA = f"{OUT}/hydra"
"""Where Hydra writes, before the run begins, what it composed; else it makes a folder wherever it was started."""

ESTIMATORS = {"grpo": "grpo", "ppo": "gae"}
MOMENTS = 8
"""Adam's two in float32, in bytes per weight: what is trained is float32 itself."""

BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2}
REWARD = """# For a probe: what a completion is worth does not matter, but that it differs.
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **rest):
    return float(len(solution_str) % 2)
"""
ENGINES, WORKERS = "verl.workers.engine.fsdp.transformer_impl", "verl.workers.engine_workers"
WATCH = Watch(
    steps=(f"{ENGINES}:FSDPEngine.optimizer_step",),
    uses=("verl.workers.engine.base:BaseEngine.infer_batch",),
    holders=(
        Holder(
            cls=f"{WORKERS}:ActorRolloutRefWorker",
            models={"reference": "ref.engine.module", "policy": "actor.engine.module"},
            optimizer="actor.engine.optimizer",
        ),
        # A critic's worker is of the class that also stands within the policy's; its engine alone has a head for values.
        Holder(cls=f"{ENGINES}:FSDPEngineWithValueHead", models={"critic": "module"}, optimizer="optimizer"),
    ),
)
Settings = Mapping[str, KnobValue]


class Verl(StandIn):
    name = "verl"
    file = "verl_fields.json"
    launcher = "python3 -m verl.trainer.main_ppo"
    model_settings = (f"{MODEL}.path", "critic.model.path")
    needs = ("verl",)
    requires: ClassVar[Mapping[str, str]] = {"verl": "verl>=0.9,<0.10"}
    environment: ClassVar[Mapping[str, str]] = {"VERL_FILE_LOGGER_PATH": f"{OUT}/metrics.jsonl"}
    watch = WATCH
    told_settings = ToldSettings(kind="hydra", file=f"{HYDRA}/.hydra/config.yaml")
    canonical: Mapping[str, str] = {
        "max_prompt_length": "data.max_prompt_length",
        "max_completion_length": "data.max_response_length",
        "num_generations": f"{ROLLOUT}.n",
        "lora_r": f"{MODEL}.lora_rank",
    }
    adjusts = (f"{ROLLOUT}.tensor_model_parallel_size",)
    said_by: Mapping[str, tuple[str, ...]] = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": (f"{ACTOR}.ppo_micro_batch_size",)}
    core = (
        "data.train_batch_size", "data.max_prompt_length", "data.max_response_length", f"{ACTOR}.ppo_mini_batch_size",
        f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.use_kl_loss", f"{ACTOR}.entropy_coeff",
        f"{ACTOR}.strategy", f"{FSDP}.param_offload", f"{FSDP}.optimizer_offload", f"{FSDP}.model_dtype",
        f"{MODEL}.enable_gradient_checkpointing", f"{MODEL}.use_remove_padding", f"{ROLLOUT}.n",
        f"{ROLLOUT}.gpu_memory_utilization",
        f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.max_num_batched_tokens",
        f"{ROLLOUT}.free_cache_engine", f"{ROLLOUT}.enforce_eager",
    )  # fmt: skip

    def derived(self, settings: Settings, job: Job) -> dict[str, KnobValue]:
        found: dict[str, KnobValue] = {
            "algorithm.adv_estimator": ESTIMATORS[self.method],
            "trainer.n_gpus_per_node": job.hardware.count,
            f"{ROLLOUT}.name": "vllm",
            f"{MODEL}.lora_rank": self.lora_rank(settings, job, f"{MODEL}.lora_rank"),
        }
        total, each = job.workload.global_batch, self.table.count(settings, f"{ROLLOUT}.n")
        if total and each and total % each == 0:
            found[f"{ACTOR}.ppo_mini_batch_size"] = total // each
        if self.table.truth(settings, f"{ACTOR}.use_dynamic_bsz"):
            found[f"{ACTOR}.ppo_max_token_len_per_gpu"] = self.table.value(settings, f"{ACTOR}.ppo_max_token_len_per_gpu")
            return found
        micro = self._micro(settings, job)
        if micro and settings.get(f"{ROLLOUT}.log_prob_micro_batch_size") is None:
            found[f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"] = micro
        if micro and self.method == "ppo" and settings.get("critic.ppo_micro_batch_size") is None:
            found["critic.ppo_micro_batch_size_per_gpu"] = micro  # mandatory too, and verl has none
        return found

    def step(self, settings: Settings, job: Job) -> Step:
        table, count = self.table, self.table.count
        prompt, completion = count(settings, "data.max_prompt_length"), count(settings, "data.max_response_length")
        generations, ranks = count(settings, f"{ROLLOUT}.n"), job.hardware.count
        rows, tokens, score_tokens = self._batch(settings, job)
        sequence = max(1, count(settings, f"{ACTOR}.ulysses_sequence_parallel_size"))
        mini = count(settings, f"{ACTOR}.ppo_mini_batch_size") * generations * sequence // ranks
        entropy = table.share(settings, f"{ACTOR}.entropy_coeff") != 0 or table.truth(settings, f"{ACTOR}.calculate_entropy")
        second = table.text(settings, f"{ACTOR}.strategy") == "fsdp2"
        whole = BYTES.get(table.text(settings, f"{FSDP}.model_dtype"), 4)
        params, optimizer = (table.truth(settings, f"{FSDP}.{what}_offload") for what in ("param", "optimizer"))
        size = count(settings, f"{FSDP}.fsdp_size")
        return Step(
            prompt=prompt,
            completion=completion,
            tokens=tokens,
            score_tokens=score_tokens,
            rows=rows,
            accumulation=max(1, mini // max(1, rows)),
            generation_batch=count(settings, "data.train_batch_size") * generations,
            ranks=ranks,
            sharding="fsdp2" if second and ranks > 1 else "fsdp1",
            options=self._options(settings, whole),
            shard_ranks=size if size > 0 else None,
            held_dtype="float32" if whole == 4 else "bfloat16",
            mixed=second and ranks > 1,
            adapter=self._adapter(settings),
            loss="logprobs_kernel",
            loss_options={"in_place": not entropy, "entropy": entropy},
            score_options={"entropy": True},
            checkpointing=table.truth(settings, f"{MODEL}.enable_gradient_checkpointing"),
            clip=table.share(settings, f"{ACTOR}.grad_clip"),
            others=tuple(self._others(settings, job, policy_leaves=params and optimizer)),
            engine=self._engine(settings, prompt + completion),
            processes=2,
            away_in_rollout=(*(("weights", "adapters") if params else ()), *(("optimizer",) if optimizer else ())),
            notes=tuple(self._notes(settings)),
        )

    def _batch(self, settings: Settings, job: Job) -> tuple[int, int, int]:
        """Rows in a micro-batch, its tokens on one GPU, and those of a pass for log-probabilities."""
        count = self.table.count
        longest = count(settings, "data.max_prompt_length") + count(settings, "data.max_response_length")
        sequence = max(1, count(settings, f"{ACTOR}.ulysses_sequence_parallel_size"))
        here = job.hardware.count // sequence or 1
        generations = count(settings, f"{ROLLOUT}.n")
        if self.table.truth(settings, f"{ACTOR}.use_dynamic_bsz"):
            mini = -(-count(settings, f"{ACTOR}.ppo_mini_batch_size") * generations // here) * longest // sequence
            whole = -(-count(settings, "data.train_batch_size") * generations // here) * longest // sequence
            budget = min(count(settings, f"{ACTOR}.ppo_max_token_len_per_gpu"), mini)
            score = min(count(settings, f"{ROLLOUT}.log_prob_max_token_len_per_gpu"), whole)
            return max(1, budget * sequence // longest), max(1, budget), max(1, score)
        rows, score_rows = self._micro(settings, job) or 1, self._score_rows(settings, job) or 1
        return rows, -(-rows * longest // sequence), -(-score_rows * longest // sequence)

    def _micro(self, settings: Settings, job: Job) -> int:
        """Per GPU; the older setting counts over all of them."""
        name = f"{ACTOR}.ppo_micro_batch_size"
        return self.table.count(settings, f"{name}_per_gpu") or self._over_all(settings, job, name)

    def _score_rows(self, settings: Settings, job: Job) -> int:
        """The larger of the policy's own pass and the reference's."""
        names = (f"{ROLLOUT}.log_prob_micro_batch_size", f"{REF}.log_prob_micro_batch_size")
        return max(self.table.count(settings, f"{name}_per_gpu") or self._over_all(settings, job, name) for name in names)

    def _over_all(self, settings: Settings, job: Job, name: str) -> int:
        sequence = max(1, self.table.count(settings, f"{ACTOR}.ulysses_sequence_parallel_size"))
        return self.table.count(settings, name) // max(1, job.hardware.count // sequence)

    def _options(self, settings: Settings, master_bytes: int) -> Mapping[str, object]:
        cuts = self.table.truth(settings, f"{FSDP}.reshard_after_forward")
        strategy = {"sharding_strategy": "FULL_SHARD" if cuts else "SHARD_GRAD_OP"}
        return {**strategy, "master_bytes": master_bytes, "frozen_master_bytes": master_bytes, "reduce_bytes": 4}

    def _adapter(self, settings: Settings) -> Mapping[str, object] | None:
        rank = self.table.count(settings, f"{MODEL}.lora_rank")
        if not rank:
            return None
        return {
            "lora_r": rank,
            "lora_alpha": self.table.count(settings, f"{MODEL}.lora_alpha"),
            "lora_target_modules": self.table.text(settings, f"{MODEL}.target_modules"),
        }

    def _others(self, settings: Settings, job: Job, *, policy_leaves: bool) -> Iterator[Other]:
        """A reference needs no device of its own, nor does a critic that comes and goes by turns with the policy."""
        model = job.workload.model.name
        if self.method == "ppo":
            leaves = all(self.table.truth(settings, f"critic.fsdp.{what}_offload") for what in ("param", "optimizer"))
            whole = BYTES.get(self.table.text(settings, "critic.fsdp.model_dtype"), 4)
            yield Other(
                role="critic",
                model=self.table.text(settings, "critic.model.path") if settings.get("critic.model.path") else model,
                dtype="float32" if whole == 4 else "bfloat16",
                trains=True,
                awake=() if leaves and policy_leaves else None,
                turn_bytes_per_weight=MOMENTS if leaves and policy_leaves else 0,
            )

    def _engine(self, settings: Settings, longest: int) -> EngineSettings:
        return EngineSettings(
            utilization=self.table.share(settings, f"{ROLLOUT}.gpu_memory_utilization"),
            max_model_length=self.table.count(settings, f"{ROLLOUT}.max_model_len") or longest,
            max_num_seqs=self.table.count(settings, f"{ROLLOUT}.max_num_seqs"),
            tensor_parallel=self.table.count(settings, f"{ROLLOUT}.tensor_model_parallel_size") or 1,
            sleep=self.table.truth(settings, f"{ROLLOUT}.free_cache_engine"),
            eager=self.table.truth(settings, f"{ROLLOUT}.enforce_eager"),
            max_num_batched_tokens=self.table.count(settings, f"{ROLLOUT}.max_num_batched_tokens"),
            apart=True,
        )

    def bounded(self, settings: Settings, steps: int) -> dict[str, KnobValue]:
        return {
            "trainer.total_training_steps": steps, "trainer.val_before_train": False, "trainer.test_freq": -1,
            "trainer.save_freq": -1, "trainer.logger": '["console","file"]', "trainer.default_local_dir": f"{OUT}/checkpoints",
            f"{ROLLOUT}.ignore_eos": True, "hydra.run.dir": HYDRA,
        }  # fmt: skip

    def data(self, dataset: str) -> dict[str, KnobValue]:
        return {"data.train_files": dataset, "data.val_files": dataset}

    def material(self, settings: Settings, job: Job) -> tuple[dict[str, KnobValue], dict[str, str]]:
        prompts = made_up_prompts(
            self.table.count(settings, "data.train_batch_size"), self.table.count(settings, "data.max_prompt_length")
        )
        about = {"data_source": "made up", "reward_model": {"style": "rule", "ground_truth": ""}}
        rows = [json.dumps({"prompt": [{"role": "user", "content": prompt}], **about}) for prompt in prompts]
        files = {"reward.py": REWARD, "rows.jsonl": "\n".join(rows) + "\n"}
        named = self.data(job.workload.dataset or f"{OUT}/rows.jsonl")
        return {**named, "reward.custom_reward_function.path": f"{OUT}/reward.py"}, files

    def figures(self, settings: Settings) -> Figures:
        """Its own throughput counts prompts too: completions are as many as rows, at their mean length."""
        rows = self.table.count(settings, "data.train_batch_size") * self.table.count(settings, f"{ROLLOUT}.n")
        return Figures(
            kind="json", file=f"{OUT}/metrics.jsonl", under="data", times=rows,
            keys={"tokens": ("response_length/mean",), "seconds": ("perf/time_per_step",)},
        )  # fmt: skip

    def with_one_row(self, settings: Settings) -> dict[str, KnobValue] | None:
        if not self.table.truth(settings, f"{MODEL}.use_remove_padding"):
            return None
        longest = sum(self.table.count(settings, f"data.max_{which}_length") for which in ("prompt", "response"))
        sequence = max(1, self.table.count(settings, f"{ACTOR}.ulysses_sequence_parallel_size"))
        if self.table.truth(settings, f"{ACTOR}.use_dynamic_bsz"):
            budget = -(-longest // sequence)
            least = {f"{ACTOR}.ppo_max_token_len_per_gpu": budget, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": budget}
        else:
            least = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1}
            least |= {f"{REF}.log_prob_micro_batch_size_per_gpu": 1}
        shorter = {**settings, **least}
        return None if all(settings.get(name) == value for name, value in least.items()) else shorter

    def _notes(self, settings: Settings) -> Iterator[str]:
        yield f"written after verl {self.table.version}: trainer and vLLM are two processes on each GPU"
        yield "log-probabilities by flash-attn's cross-entropy, as verl takes them where flash-attn is installed"
        if self.method == "ppo":
            yield "the critic is taken to be trained in full, with activations no larger than the policy's"
        if self._has_reference(settings) and not self.table.count(settings, f"{MODEL}.lora_rank"):
            yield "the reference stays on the host, but for the layer that runs"

    def _has_reference(self, settings: Settings) -> bool:
        return self.table.truth(settings, f"{ACTOR}.use_kl_loss") or self.table.truth(settings, "algorithm.use_kl_in_reward")

    def not_followed(self, settings: Settings) -> Iterator[str]:
        if settings.get(f"{ACTOR}.strategy") not in (None, "fsdp", "fsdp2"):
            yield f"{ACTOR}.strategy={settings[f'{ACTOR}.strategy']} spreads the model in another way"
        if settings.get(f"{ROLLOUT}.name") not in (None, "vllm"):
            yield f"{ROLLOUT}.name={settings[f'{ROLLOUT}.name']} is another engine than vLLM"
        for name in (
            f"{MODEL}.use_fused_kernels",
            f"{MODEL}.use_liger",
            f"{MODEL}.enable_activation_offload",
            f"{FSDP}.offload_policy",
        ):
            if settings.get(name):
                yield f"{name}=true changes what a step holds"
        for name in ("reward_model.enable", "reward.reward_model.enable"):
            if settings.get(name):
                yield f"{name}=true runs another model in an engine of its own"

    def refusals(self, settings: Settings, job: Job) -> Iterator[str]:
        """As `utils/config.py` and `workers/config/actor.py` assert them."""
        table, count = self.table, self.table.count
        gpus, prompts, mini = (
            job.hardware.count,
            count(settings, "data.train_batch_size"),
            count(settings, f"{ACTOR}.ppo_mini_batch_size"),
        )
        generations = count(settings, f"{ROLLOUT}.n")
        yield from self._tuning_refusals(settings, job)
        if self.method == "grpo" and generations < 2:
            yield f"{ROLLOUT}.n={generations} leaves GRPO nothing to compare a prompt's completions with: give --num-generations."
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
        yield from self._batch_refusals(settings, job, mini * generations * max(1, sequence) // gpus)

    def _tuning_refusals(self, settings: Settings, job: Job) -> Iterator[str]:
        rank = self.table.count(settings, f"{MODEL}.lora_rank")
        if job.workload.tuning == "qlora":
            yield "verl does not train on quantised weights: give --tuning lora or full."
        if job.workload.tuning == "full" and rank:
            yield f"{MODEL}.lora_rank={rank} trains an adapter, and the tuning is full: add --tuning lora."
        if job.workload.tuning == "lora" and not rank:
            yield f"{MODEL}.lora_rank=0 trains all weights, and the tuning is LoRA: add --tuning full."

    def _batch_refusals(self, settings: Settings, job: Job, mini: int) -> Iterator[str]:
        """`mini` is the mini-batch of one GPU, in completions."""
        table, count = self.table, self.table.count
        longest = count(settings, "data.max_prompt_length") + count(settings, "data.max_response_length")
        if table.truth(settings, f"{ACTOR}.use_dynamic_bsz"):
            budget = count(settings, f"{ACTOR}.ppo_max_token_len_per_gpu")
            sequence = max(1, count(settings, f"{ACTOR}.ulysses_sequence_parallel_size"))
            if budget * sequence < longest:
                yield f"{ACTOR}.ppo_max_token_len_per_gpu={budget} is less than the longest sequence, {longest} tokens."
            return
        total = count(settings, "data.train_batch_size") * count(settings, f"{ROLLOUT}.n")
        if total % job.hardware.count:
            yield f"data.train_batch_size x {ROLLOUT}.n = {total} is not divisible by {job.hardware.count} GPUs."
        name = f"{ACTOR}.ppo_micro_batch_size"
        if settings.get(name) is not None and settings.get(f"{name}_per_gpu") is not None:
            yield f"{name} and {name}_per_gpu are both set: leave the former out."
        micro = self._micro(settings, job)
        if not micro:
            yield f"{name}_per_gpu must be set, unless {ACTOR}.use_dynamic_bsz=true."
        elif not mini or mini % micro:
            yield f"a GPU's part of the mini-batch, {mini} completions, is not divisible by {name}_per_gpu={micro}."
        if micro and not self._score_rows(settings, job):
            yield f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu must be set, unless {ACTOR}.use_dynamic_bsz=true."


TRAINERS = (Verl("grpo"), Verl("ppo"))

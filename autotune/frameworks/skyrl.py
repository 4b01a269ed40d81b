"""SkyRL: FSDP2 workers on Ray and vLLM, on the same GPUs or on GPUs of their own.

Written for skyrl 0.3.0 (`backends/skyrl_train/workers`, `backends/skyrl_train/distributed/fsdp_strategy.py`,
`train/utils/utils.py`). Assumptions of the stand-in step:

- Weights are stored in float32, frozen ones included, gathered in bfloat16 and reduced in float32.
- Policy and reference are processes of their own. The idle one is on the host, in colocated runs
  and with `colocate_policy_ref`.
- Log-probabilities: flash-attn's cross-entropy, whose gradient overwrites the logits. The entropy
  is computed in float32 chunks of `logprobs_chunk_size` tokens, with a gradient only if it is a loss.
- With an adapter, the adapter alone is sent to vLLM, and vLLM keeps the base weights on the host.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping

from autotune.core.candidate import KnobValue
from autotune.core.task import Task
from autotune.frameworks.base import Settings, as_word
from autotune.frameworks.hydra_values import without_references
from autotune.frameworks.stand_in import StandIn
from autotune.frameworks.stand_in_step import OtherModel, StandInSpec

POLICY, ENGINE, PLACEMENT = "trainer.policy", "generator.inference_engine", "trainer.placement"
MICRO, SCORED = "trainer.micro_train_batch_size_per_gpu", "trainer.micro_forward_batch_size_per_gpu"
BUDGET, PACKED = "trainer.max_tokens_per_microbatch", "trainer.remove_microbatch_padding"
ENGINE_SIZES = ("num_engines", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
FULL_PRECISION_STATE = {"units": "layers", "master_bytes": 4, "frozen_master_bytes": 4, "reduce_bytes": 4}
PLAIN = re.compile(r"[A-Za-z_/.][\w/.@+-]*", re.ASCII)


class SkyRl(StandIn):
    def argument(self, name: str, value: KnobValue) -> str:
        return f"{name}={shlex.quote(as_word(value))}"

    def as_path(self, path: str) -> str:
        """Quote a text for OmegaConf's command line: YAML, in which `${` begins a reference."""
        return path if PLAIN.fullmatch(path) else json.dumps(without_references(path), ensure_ascii=False)

    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        count, gpus = self.table.count, task.hardware.count
        parallel = max(1, count(settings, f"{ENGINE}.tensor_parallel_size"))
        together = self.table.truth(settings, f"{PLACEMENT}.colocate_all")
        engines = gpus // parallel if together else max(1, gpus // 2 // parallel)
        engines = count(settings, f"{ENGINE}.num_engines") if f"{ENGINE}.num_engines" in settings else engines
        trains = gpus if together else max(1, gpus - engines * parallel)
        found: dict[str, KnobValue] = {
            "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{self.table.truth(settings, 'trainer.use_expandable_segments')}",
            "trainer.algorithm.advantage_estimator": "grpo",
            f"{PLACEMENT}.policy_num_gpus_per_node": trains,
            f"{PLACEMENT}.ref_num_gpus_per_node": trains,
            f"{ENGINE}.num_engines": engines,
            f"{POLICY}.model.lora.rank": self.lora_rank(settings, task),
        }
        total, each = task.workload.global_batch, count(settings, "generator.n_samples_per_prompt")
        if total and each and total % each == 0:
            found["trainer.policy_mini_batch_size"] = total // each
        return found

    def lengths(self, settings: Settings) -> tuple[int, int]:
        count = self.table.count
        return count(settings, "trainer.max_prompt_length"), count(settings, "generator.sampling_params.max_generate_length")

    def step(self, settings: Settings, task: Task) -> StandInSpec:
        table, count, truth = self.table, self.table.count, self.table.truth
        prompt, completion = self.lengths(settings)
        ranks, sequence = self._trains_on(settings), self._sequence(settings)
        rows, tokens, score_tokens = self._batch(settings, prompt + completion)
        generations = count(settings, "generator.n_samples_per_prompt")
        mini = count(settings, "trainer.policy_mini_batch_size") * generations * sequence // ranks
        together = truth(settings, f"{PLACEMENT}.colocate_all")
        others = tuple(self._others(settings, task))
        states = ("optimizer",) if truth(settings, f"{POLICY}.optimizer_config.offload_after_step") else ()
        size = count(settings, f"{POLICY}.fsdp_config.fsdp_size")
        return StandInSpec(
            prompt_length=prompt,
            completion_length=completion,
            tokens=tokens,
            score_tokens=score_tokens,
            micro_batch=rows,
            accumulation=max(1, mini // max(1, rows)),
            generation_batch=count(settings, "trainer.train_batch_size") * generations,
            ranks=ranks,
            sharded_by="fsdp2",
            options={
                **FULL_PRECISION_STATE,
                "reshard_after_forward": truth(settings, f"{POLICY}.fsdp_config.reshard_after_forward"),
            },
            shard_ranks=size if size > 0 else None,
            held_dtype="float32",
            mixed=True,
            adapter=self.adapter_settings(settings),
            loss="logprobs_kernel",
            loss_options={
                "in_place": True,
                "entropy": True,
                "entropy_chunk": count(settings, "trainer.logprobs_chunk_size"),
                "entropy_in_loss": truth(settings, "trainer.algorithm.use_entropy_loss"),
            },
            score_options={"entropy": False},
            checkpointing=truth(settings, "trainer.gradient_checkpointing"),
            reentrant=truth(settings, "trainer.gradient_checkpointing_use_reentrant"),
            clip=table.share(settings, f"{POLICY}.optimizer_config.max_grad_norm"),
            attention="flash_attention_2" if truth(settings, "trainer.flash_attn") else "sdpa",
            others=others,
            generation="engine" if together else "server",
            engine=self.engine_settings(settings) if together else None,
            processes=1 + len(others) + together,
            offloaded_in_rollout=("weights", "adapters", *states) if together else (),
            empties_rollout_cache=together,
            syncs_adapter_only=bool(self.adapter_settings(settings)),
            notes=tuple(self._notes(settings, len(others), together=together)),
        )

    def _trains_on(self, settings: Settings) -> int:
        nodes, each = (self.table.count(settings, f"{PLACEMENT}.policy_num_{part}") for part in ("nodes", "gpus_per_node"))
        return max(1, nodes * each)

    def _sequence(self, settings: Settings) -> int:
        return max(1, self.table.count(settings, f"{POLICY}.sequence_parallel_size"))

    def _batch(self, settings: Settings, longest: int) -> tuple[int, int, int]:
        """Return rows and tokens of a micro-batch on one GPU, and tokens of a scoring pass."""
        count, sequence = self.table.count, self._sequence(settings)
        if (budget := count(settings, BUDGET)) > 0:  # a longer row is a micro-batch by itself
            tokens = -(-max(budget, longest) // sequence)
            return max(1, budget // longest), tokens, tokens
        rows, scored = count(settings, MICRO), count(settings, SCORED)
        return rows, -(-rows * longest // sequence), -(-scored * longest // sequence)

    def _others(self, settings: Settings, task: Task) -> Iterator[OtherModel]:
        """Yield the reference. The dispatcher offloads it before the policy is loaded."""
        if self._has_reference(settings) and self.table.truth(settings, f"{PLACEMENT}.colocate_policy_ref"):
            yield OtherModel(role="reference", model=task.workload.model.name, awake=())

    def _has_reference(self, settings: Settings) -> bool:
        return any(self.table.truth(settings, f"trainer.algorithm.{name}") for name in ("use_kl_loss", "use_kl_in_reward"))

    def with_one_row(self, settings: Settings) -> Mapping[str, KnobValue]:
        if not self.table.truth(settings, PACKED):
            return {}
        return {MICRO: 1, SCORED: 1, BUDGET: min(self.table.count(settings, BUDGET), sum(self.lengths(settings)))}

    def _notes(self, settings: Settings, others: int, *, together: bool) -> Iterator[str]:
        here = f"policy{', reference' * others}{' and vLLM' * together}"
        yield f"modelled on skyrl {self.table.version}: processes of their own on each GPU for {here}"
        yield "log-probabilities by flash-attn's cross-entropy, which SkyRL uses if flash-attn is installed"
        if not together:
            yield "only the policy's GPUs are modelled, not those of vLLM"

    def rules(self, settings: Settings, task: Task) -> Iterator[str]:
        """Yield violations of `validate_cfg`, `validate_batch_sizes` and of the configuration's own checks."""
        table, count, gpus = self.table, self.table.count, task.hardware.count
        if task.workload.tuning == "qlora":
            yield "SkyRL's FSDP workers cannot train on quantised weights: use --tuning lora or full."
        else:
            yield from self.lora_refusals(settings, task)
        generations = count(settings, "generator.n_samples_per_prompt")
        if generations < 2:
            yield f"generator.n_samples_per_prompt={generations} must be at least 2 to compare them: set --num-generations."
        if all(table.truth(settings, f"trainer.algorithm.{name}") for name in ("use_kl_loss", "use_kl_in_reward")):
            yield "trainer.algorithm.use_kl_loss and use_kl_in_reward exclude each other."
        if table.truth(settings, PACKED) > table.truth(settings, "trainer.flash_attn"):
            yield f"{PACKED}=true requires trainer.flash_attn=true."
        if table.truth(settings, f"{ENGINE}.enforce_eager") and count(settings, f"{POLICY}.model.lora.rank"):
            yield f"{ENGINE}.enforce_eager=true: SkyRL changes it to false with an adapter. Set it to false."
        if count(settings, "trainer.logprobs_chunk_size") < 1:
            yield "trainer.logprobs_chunk_size must be above zero with FSDP."
        trains, serves = self._trains_on(settings), math.prod(count(settings, f"{ENGINE}.{name}") for name in ENGINE_SIZES)
        if table.truth(settings, f"{PLACEMENT}.colocate_all"):
            if trains != serves or trains != gpus:
                yield f"with colocate_all, policy and vLLM must use the {gpus} GPUs, and they use {trains} and {serves}."
        elif trains + serves > gpus:
            yield f"policy and vLLM use {trains} + {serves} GPUs without colocate_all, and the request is for {gpus}."
        sequence = self._sequence(settings)
        if trains % sequence:
            yield f"the policy's {trains} GPUs are not divisible by {POLICY}.sequence_parallel_size={sequence}."
        else:
            yield from self._batch_refusals(settings, max(1, trains // sequence), generations)

    def _batch_refusals(self, settings: Settings, parallel: int, generations: int) -> Iterator[str]:
        """Yield broken batch rules; `parallel` is the number of data-parallel groups."""
        sizes = ("trainer.train_batch_size", "trainer.policy_mini_batch_size", MICRO, SCORED)
        prompts, mini, micro, scored = (self.table.count(settings, name) for name in sizes)
        if min(prompts, mini, micro, scored) < 1:
            yield "trainer's train, mini and micro batch sizes must be above zero."
        elif prompts % mini:
            yield f"trainer.train_batch_size={prompts} is not divisible by trainer.policy_mini_batch_size={mini}."
        elif mini * generations // parallel % micro or mini * generations < parallel:
            own = mini * generations // parallel
            yield f"a GPU's part of the mini-batch, {own} completions, is not divisible by {MICRO}={micro}."


TRAINERS = (SkyRl("skyrl", "grpo"),)

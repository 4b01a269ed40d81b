"""Composition of a TRL run: resident models per rank, and the shape of the step."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.core.candidate import Candidate
from autotune.core.composition import Composition, EngineSettings, Generation, Resident, Sharding
from autotune.core.task import Task
from autotune.frameworks.base import Settings, count_of, share_of
from autotune.frameworks.stand_in_step import SPREAD_BY
from autotune.frameworks.trl.settings import COMPLETIONS_PER_ROW, max_num_seqs
from autotune.frameworks.trl.topology import ranks_of, sharding_of
from autotune.frameworks.trl.weight_dtype import engine_dtype

ONLINE = frozenset({"grpo", "rloo", "online-dpo"})
"""Methods that generate completions."""

WITH_REFERENCE = frozenset({"dpo", "online-dpo"})
"""Methods with a reference model for every beta."""


def compose(candidate: Candidate, task: Task) -> Composition:
    settings, ranks = candidate.settings, ranks_of(candidate.settings, task.hardware.count)
    micro, steps = count_of(settings, "per_device_train_batch_size"), count_of(settings, "steps_per_generation")
    generation = _generation(settings, task)
    if (per_row := COMPLETIONS_PER_ROW.get(task.workload.method)) is not None:
        micro, steps = micro * per_row, 1  # each micro-step generates its own completions
    attention = settings.get("attn_implementation")
    return Composition(
        residents=tuple(_residents(candidate, task, generation)),
        ranks=ranks,
        micro_batch=micro,
        accumulation=count_of(settings, "gradient_accumulation_steps") or 1,
        generation_batch=0 if generation == "none" else micro * ranks * steps,
        prompt_length=count_of(settings, "max_prompt_length"),
        completion_length=count_of(settings, "max_completion_length"),
        checkpointing=bool(settings.get("gradient_checkpointing")),
        optimizer=str(settings.get("optim")),
        generation=generation,
        gathers_per_token=generation == "trainer" and settings.get("ds3_gather_for_generation") is False,
        engine=_engine(settings, task) if generation == "engine" else None,
        attention=attention if isinstance(attention, str) else None,
        sharded_by=sharding_of(settings, ranks),
    )


def _generation(settings: Settings, task: Task) -> Generation:
    if task.workload.method not in ONLINE:
        return "none"
    if not settings.get("use_vllm"):
        return "trainer"
    return "server" if settings.get("vllm_mode") == "server" else "engine"


def _residents(candidate: Candidate, task: Task, generation: Generation) -> Iterator[Resident]:
    settings, model = candidate.settings, task.workload.model.name
    ranks = tuple(range(ranks_of(settings, task.hardware.count)))
    adapter = count_of(settings, "lora_r") if settings.get("use_peft") else None
    bits = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else None
    dtype, sharding = str(settings.get("dtype")), sharding_of(settings, len(ranks))
    spread = SPREAD_BY.get(sharding, "none")
    yield Resident(
        role="policy", model=model, ranks=ranks, dtype=dtype, trains=True, adapter_rank=adapter, quantised_bits=bits,
        sharding=spread,
    )  # fmt: skip
    if settings.get("beta") or task.workload.method in WITH_REFERENCE:
        # With an adapter, the reference is the policy with the adapter off.
        yield Resident(
            role="reference", model=model, ranks=ranks, dtype=dtype, trains=False, quantised_bits=bits, sharding=spread,
            shares_weights_with="policy" if adapter is not None else None,
        )  # fmt: skip
    judge = task.workload.user_settings.get("reward_model_name_or_path")
    if isinstance(judge, str) and generation != "none":
        # Sharded by DeepSpeed like the policy; replicated otherwise.
        cut: Sharding = "parameters" if sharding == "zero3" else "none"
        yield Resident(role="reward", model=judge, ranks=ranks, dtype=dtype, trains=False, sharding=cut)
    if generation == "engine":
        yield Resident(
            role="engine", model=model, ranks=ranks, dtype=engine_dtype(task.workload.model.config), trains=False,
            sharding="tensor" if settings.get("vllm_tensor_parallel_size", 1) != 1 else "none",
            claims_share=share_of(settings, "vllm_gpu_memory_utilization") or None,
            awake=("rollout", "sync") if settings.get("vllm_enable_sleep_mode") else None,
        )  # fmt: skip


def _engine(settings: Settings, task: Task) -> EngineSettings:
    """Return TRL's engine: CUDA graphs, and weights in the model's precision or in 4 bits."""
    window = count_of(settings, "vllm_max_model_length") or count_of(task.workload.model.config, "max_position_embeddings")
    return EngineSettings(
        utilization=share_of(settings, "vllm_gpu_memory_utilization"),
        max_model_length=window,
        max_num_seqs=max_num_seqs(settings),
        tensor_parallel=count_of(settings, "vllm_tensor_parallel_size") or 1,
        sleep=bool(settings.get("vllm_enable_sleep_mode")),
        quantised_bits=4 if settings.get("load_in_4bit") else None,
    )

"""TRL's models during training: who is resident where, and the shape of the step that runs over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autotune.candidate import Candidate, Knobs
from autotune.composition import Composition, EngineSettings, Generation, Resident, Role, Sharding
from autotune.trainers.base import Job
from autotune.trainers.trl_settings import A_PAIR, max_num_seqs
from autotune.trainers.trl_topology import ranks_of, sharding_of

ONLINE = frozenset({"grpo", "rloo", "online-dpo"})
"""Methods that write their own completions."""

WITH_REFERENCE = frozenset({"dpo", "online-dpo"})
"""Methods that compare with a reference whatever beta is."""

SPREAD_BY: Mapping[str, Sharding] = {
    "zero1": "optimizer",
    "zero2": "gradients",
    "zero3": "parameters",
    "fsdp1": "parameters",
    "fsdp2": "parameters",
}


def compose(candidate: Candidate, job: Job) -> Composition:
    settings, ranks = candidate.settings, ranks_of(candidate.settings, job.hardware.count)
    micro = _int(settings.get("per_device_train_batch_size"))
    generation = _generation(settings, job)
    return Composition(
        residents=tuple(_residents(candidate, job, generation)),
        ranks=ranks,
        micro_batch=micro,
        accumulation=_int(settings.get("gradient_accumulation_steps")) or 1,
        generation_batch=0 if generation == "none" else micro * ranks * _int(settings.get("steps_per_generation")),
        prompt_length=_int(settings.get("max_prompt_length")),
        completion_length=_int(settings.get("max_completion_length")),
        checkpointing=bool(settings.get("gradient_checkpointing")),
        optimizer=str(settings.get("optim")),
        generation=generation,
        gathers_each_token=generation == "trainer" and settings.get("ds3_gather_for_generation") is False,
        engine=_engine(settings, job) if generation == "engine" else None,
        attention=_text(settings.get("attn_implementation")),
        sharded_by=sharding_of(settings, ranks),
    )


def pairs(composition: Composition) -> Composition:
    """Online DPO's: a micro-batch counts prompts, and each micro-step writes what it learns from."""
    rows = A_PAIR * composition.micro_batch
    return replace(composition, micro_batch=rows, generation_batch=rows * composition.ranks)


def _generation(settings: Mapping[str, object], job: Job) -> Generation:
    if job.workload.method not in ONLINE:
        return "none"
    if not settings.get("use_vllm"):
        return "trainer"
    return "server" if settings.get("vllm_mode") == "server" else "engine"


def _residents(candidate: Candidate, job: Job, generation: Generation) -> Iterator[Resident]:
    settings, model = candidate.settings, job.workload.model.name
    ranks = tuple(range(ranks_of(settings, job.hardware.count)))
    adapter = _int(settings.get("lora_r")) if settings.get("use_peft") else None
    bits = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else None
    dtype = str(settings.get("dtype"))
    spread = SPREAD_BY.get(sharding_of(settings, len(ranks)), "none")
    yield Resident(
        role="policy",
        model=model,
        ranks=ranks,
        dtype=dtype,
        trains=True,
        adapter_rank=adapter,
        quantised_bits=bits,
        sharding=spread,
    )
    if settings.get("beta") or job.workload.method in WITH_REFERENCE:
        shared: Role | None = "policy" if adapter is not None else None
        yield Resident(
            role="reference", model=model, ranks=ranks, dtype=dtype, trains=False, quantised_bits=bits, sharding=spread,
            shares_weights_with=shared, awake=None,
        )  # fmt: skip
    judge = job.workload.user_settings.get("reward_model_name_or_path")
    if isinstance(judge, str) and generation != "none":
        # Prepared for DeepSpeed as the policy is; whole on every rank under anything else.
        cut: Sharding = "parameters" if sharding_of(settings, len(ranks)) == "zero3" else "none"
        yield Resident(role="reward", model=judge, ranks=ranks, dtype=dtype, trains=False, sharding=cut)
    if generation == "engine":
        yield _resident_engine(settings, model, ranks, dtype)


def _resident_engine(settings: Mapping[str, object], model: str, ranks: tuple[int, ...], dtype: str) -> Resident:
    share = settings.get("vllm_gpu_memory_utilization")
    return Resident(
        role="engine",
        model=model,
        ranks=ranks,
        dtype=dtype,
        trains=False,
        sharding="tensor" if settings.get("vllm_tensor_parallel_size", 1) != 1 else "none",
        claims_share=float(share) if isinstance(share, int | float) else None,
        awake=("rollout", "sync") if settings.get("vllm_enable_sleep_mode") else None,
    )


def _engine(settings: Knobs, job: Job) -> EngineSettings:
    """As TRL makes it: graphs are captured, and the weights are in the model's own precision, 4-bit ones in 4 bits."""
    window = _int(settings.get("vllm_max_model_length")) or _int(job.workload.model.config.get("max_position_embeddings"))
    share = settings.get("vllm_gpu_memory_utilization")
    return EngineSettings(
        utilization=float(share) if isinstance(share, int | float) else 0.0,
        max_model_length=window,
        max_num_seqs=max_num_seqs(settings),
        tensor_parallel=_int(settings.get("vllm_tensor_parallel_size")) or 1,
        sleep=bool(settings.get("vllm_enable_sleep_mode")),
        quantised_bits=4 if settings.get("load_in_4bit") else None,
    )


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None

"""What unsloth's settings mean in the common words of a step, so that what it would take can be told within bounds.

unsloth replaces the model's layers, its loss and its checkpointing by kernels of its own, which no plain step has. They keep no
more than a plain step does, and no less than the state that is trained: the first is the estimate and its upper end, the second
its lower end.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.candidate import KnobValue
from autotune.composition import EngineSettings
from autotune.trainers.base import Job, count_of
from autotune.trainers.generic_step import Step

Settings = Mapping[str, KnobValue]

SPARED = ("activations", "logits")
"""Parts of which its kernels may keep next to nothing: chunked losses, and checkpoints that wait on the host."""

NOTES = (
    "after unsloth 2026.10: a plain step is the most; its own kernels keep less, at the lower end no activations and no logits",
    "vLLM's weights are the model's own and count once",
)


def step(settings: Settings, job: Job, method: str) -> Step:
    micro, accumulation = (
        count_of(settings, "per_device_train_batch_size"),
        count_of(settings, "gradient_accumulation_steps") or 1,
    )
    prompt, completion = _lengths(settings, method)
    grpo, engine = method == "grpo", bool(settings.get("fast_inference"))
    return Step(
        prompt=prompt,
        completion=completion,
        tokens=micro * (prompt + completion),
        score_tokens=micro * (prompt + completion),
        rows=micro,
        accumulation=accumulation,
        generation_batch=micro * accumulation if grpo else 0,
        ranks=1,
        sharding="none",
        adapter=None if settings.get("full_finetuning") else _adapter(settings),
        quantised=bool(settings.get("load_in_4bit")),
        loss="logprobs_plain" if grpo else "causal_lm",
        loss_options={"completion_alone": True} if grpo else {},
        checkpointing=bool(settings.get("use_gradient_checkpointing")),
        optimizer=str(settings.get("optim")),
        attention="sdpa",
        generation="none" if not grpo else "engine" if engine else "trainer",
        engine=_engine(settings, prompt + completion, micro * accumulation) if grpo and engine else None,
        pushes_adapter=True,
        spared=SPARED,
        notes=NOTES if grpo and engine else NOTES[:1],
    )


def _lengths(settings: Settings, method: str) -> tuple[int, int]:
    if method == "grpo":
        return count_of(settings, "max_prompt_length"), count_of(settings, "max_completion_length")
    return max(1, count_of(settings, "max_seq_length") - 1), 1


def _adapter(settings: Settings) -> Mapping[str, object]:
    rank = count_of(settings, "lora_rank")
    return {"lora_r": rank, "lora_alpha": rank, "lora_target_modules": "all-linear"}


def _engine(settings: Settings, longest: int, sequences: int) -> EngineSettings:
    share = settings.get("gpu_memory_utilization")
    return EngineSettings(
        utilization=float(share) if isinstance(share, int | float) else 0.0,
        max_model_length=longest,
        max_num_seqs=sequences,
        sleep=bool(settings.get("vllm_standby")),
        quantised_bits=4 if settings.get("load_in_4bit") else None,
        shares_weights=True,
    )

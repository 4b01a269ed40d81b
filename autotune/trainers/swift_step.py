"""What ms-swift's settings mean in the common words of a step, so that what it would take can be predicted.

Read from ms-swift 4.6.0 (`rlhf_trainers/{grpo_trainer,rollout_mixin}.py`). What stands in:

- Logits of the completion alone (`logits_to_keep`), in the model's precision, and their log-softmax.
- With vLLM as a server, its GPUs are not the trainer's; started in the same processes, it shares their context.
- Weights reach vLLM all at once, an adapter merged into them, unless `vllm_enable_lora` pushes the adapter alone or
  `move_model_batches` cuts them into so many parts.
- Prompts are as long as `max_length` lets them be: `vllm_max_model_len` bounds what vLLM writes, and not what is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.candidate import KnobValue
from autotune.composition import EngineSettings, Generation
from autotune.trainers.base import Job, count_of
from autotune.trainers.generic_step import Other, Step, gptq_bits

Settings = Mapping[str, KnobValue]

MAX_NUM_SEQS = 256
"""Of `swift rollout`, and of vLLM itself."""

SHARDED: Mapping[KnobValue, tuple[str, bool, bool]] = {
    "zero0": ("ddp", False, False),
    "zero1": ("zero1", False, False),
    "zero2": ("zero2", False, False),
    "zero2_offload": ("zero2", True, False),
    "zero3": ("zero3", False, False),
    "zero3_offload": ("zero3", True, True),
}
"""Its names of DeepSpeed's configurations -> who spreads the state, and whether optimizer and weights wait on the host."""


def served(settings: Settings) -> bool:
    """Whether vLLM runs on GPUs of its own."""
    return bool(settings.get("use_vllm")) and settings.get("vllm_mode") == "server"


def training_gpus(settings: Settings, gpus: int) -> int:
    """Those that the server leaves."""
    return gpus - (count_of(settings, "server_gpus") if served(settings) else 0)


def step(settings: Settings, job: Job, method: str) -> Step:
    ranks = max(1, training_gpus(settings, job.hardware.count))
    micro, accumulation = (
        count_of(settings, "per_device_train_batch_size"),
        count_of(settings, "gradient_accumulation_steps") or 1,
    )
    prompt, completion = _lengths(settings, method)
    kind, offloads_optimizer, offloads_weights = SHARDED.get(settings.get("deepspeed"), ("ddp", False, False))
    adapter, online = settings.get("tuner_type") != "full", method == "grpo"
    engine = _engine(settings, job, prompt + completion, micro * accumulation) if online else None
    return Step(
        prompt=prompt,
        completion=completion,
        tokens=micro * (prompt + completion),
        score_tokens=micro * (prompt + completion),
        rows=micro,
        accumulation=accumulation,
        generation_batch=micro * ranks * accumulation if online else 0,
        ranks=ranks,
        sharding=kind if ranks > 1 or kind.startswith("zero") else "none",
        options={
            **({"offload_optimizer": {"device": "cpu"}} if offloads_optimizer else {}),
            **({"offload_param": {"device": "cpu"}} if offloads_weights else {}),
        },
        mixed=not kind.startswith("zero"),
        adapter=_adapter(settings) if adapter else None,
        quantised=settings.get("quant_bits") == 4,
        loss="logprobs_plain" if online else "causal_lm",
        loss_options={"completion_alone": True} if online else {},
        checkpointing=bool(settings.get("gradient_checkpointing")),
        optimizer=str(settings.get("optim")),
        attention=str(settings.get("attn_impl") or "sdpa"),
        others=tuple(_others(settings, job, kind)) if online and not adapter else (),
        generation=_generation(settings, online=online),
        engine=engine,
        away_in_rollout=tuple(_away(settings)),
        pushes_adapter=adapter and bool(settings.get("vllm_enable_lora")),
        pushes_in=count_of(settings, "move_model_batches") or 1,
        notes=tuple(_notes(settings, method)),
    )


def _lengths(settings: Settings, method: str) -> tuple[int, int]:
    """Longest prompt and completion of a row: vLLM ends a completion where the sequence is as long as it accepts."""
    prompt = count_of(settings, "max_length")
    if method != "grpo":
        return max(1, prompt - 1), 1
    completion, window = count_of(settings, "max_completion_length"), count_of(settings, "vllm_max_model_len")
    if not settings.get("use_vllm") or not window or prompt + completion <= window:
        return prompt, completion
    return prompt, max(1, min(completion, window - prompt))


def _generation(settings: Settings, *, online: bool) -> Generation:
    if not online:
        return "none"
    return "trainer" if not settings.get("use_vllm") else "server" if served(settings) else "engine"


def _engine(settings: Settings, job: Job, longest: int, rows: int) -> EngineSettings | None:
    if not settings.get("use_vllm") or served(settings):
        return None
    share = settings.get("vllm_gpu_memory_utilization")
    return EngineSettings(
        utilization=float(share) if isinstance(share, int | float) else 0.0,
        max_model_length=count_of(settings, "vllm_max_model_len") or longest,
        max_num_seqs=rows or MAX_NUM_SEQS,
        tensor_parallel=count_of(settings, "vllm_tensor_parallel_size") or 1,
        sleep=bool(settings.get("sleep_level")),
        quantised_bits=4 if settings.get("quant_bits") == 4 else gptq_bits(job.workload.model.config),
    )


def _adapter(settings: Settings) -> Mapping[str, object]:
    return {
        "lora_r": count_of(settings, "lora_rank"),
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target_modules": "all-linear",
    }


def _others(settings: Settings, job: Job, kind: str) -> Iterator[Other]:
    """The reference of full tuning; an adapter's is the policy with the adapter off."""
    if settings.get("beta"):
        yield Other(role="reference", model=job.workload.model.name, whole=kind != "zero3")


def _away(settings: Settings) -> Iterator[str]:
    if settings.get("use_vllm") and settings.get("offload_model"):
        yield from ("weights", "adapters")
    if settings.get("use_vllm") and settings.get("offload_optimizer"):
        yield "optimizer"


def _notes(settings: Settings, method: str) -> Iterator[str]:
    yield "written after ms-swift 4.6.0; prompts up to max_length"
    if method == "grpo" and served(settings):
        yield f"the last {count_of(settings, 'server_gpus')} of the GPUs are the vLLM server's; the others train"

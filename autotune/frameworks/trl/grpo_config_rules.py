"""Rules of GRPOConfig, as of the newest supported TRL, checked without its code.

A property test constructs the real class at world sizes 1 to 8 and compares.
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune.frameworks.base import Settings
from autotune.frameworks.trl.field_list import fields, is_on, number_of, value_of

ENUMERATIONS = (
    "optim",
    "eval_strategy",
    "save_strategy",
    "logging_strategy",
    "lr_scheduler_type",
    "hub_strategy",
)


def config_refusals(
    settings: Settings,
    ranks: int,
    device: str,
) -> Iterator[str]:
    """Yield broken rules of GRPOConfig."""
    yield from _generation_batch(settings, ranks)
    yield from _evaluation(settings, ranks)
    yield from _precision(settings, device)
    yield from _importance_sampling(settings)
    yield from _values(settings)


def _generation_batch(settings: Settings, ranks: int) -> Iterator[str]:
    # 1. The batch is stated once, and each step takes an equal part.
    micro = number_of(settings, "per_device_train_batch_size")
    per_step = micro * ranks
    steps = settings.get("steps_per_generation")
    batch = settings.get("generation_batch_size")
    if batch is not None and steps is not None:
        yield (
            f"generation_batch_size ({batch}) and steps_per_generation ({steps}) cannot both be"
            " set."
        )
        return
    if isinstance(batch, int) and (per_step == 0 or batch % per_step):
        yield (
            f"generation_batch_size ({batch}) must be divisible by per_device_train_batch_size x"
            f" ranks ({micro} x {ranks} = {per_step})."
        )
        return

    # 2. Completions to compare.
    generations = value_of(settings, "num_generations")
    if not isinstance(generations, int) or generations < 2:
        yield (
            "num_generations must be at least 2, to compare completions of a prompt, and is"
            f" {generations!r}."
        )
        return

    # 3. Whole groups.
    if steps is None:
        steps = number_of(settings, "gradient_accumulation_steps")
    total = 0
    if isinstance(batch, int):
        total = batch
    elif isinstance(steps, int):
        total = per_step * steps
    if total % generations:
        yield (
            f"the generation batch ({total} = per_device_train_batch_size {micro} x {ranks} ranks x"
            f" steps_per_generation {total // (per_step or 1)}) must be divisible by"
            f" num_generations ({generations}): groups must be whole."
        )


def _evaluation(settings: Settings, ranks: int) -> Iterator[str]:
    if value_of(settings, "eval_strategy") == "no":
        return
    batch = number_of(settings, "per_device_eval_batch_size")
    generations = number_of(settings, "num_generations_eval")
    generations = generations or number_of(settings, "num_generations")
    if generations == 0 or (batch * ranks) % generations:
        yield (
            f"the evaluation batch (per_device_eval_batch_size {batch} x {ranks} ranks) must be"
            f" divisible by the generations of an evaluation ({generations})."
        )


def _precision(settings: Settings, device: str) -> Iterator[str]:
    fp16 = is_on(settings, "fp16")
    bf16 = value_of(settings, "bf16")
    if bf16 is None:
        bf16 = not fp16
    if fp16 and bf16:
        yield "fp16 and bf16 cannot both be on."
    uses_bf16 = bf16 or is_on(settings, "bf16_full_eval")
    if device == "cpu" and uses_bf16 and not is_on(settings, "use_cpu"):
        yield "bf16 without a GPU needs use_cpu: true."
    if is_on(settings, "fp16_full_eval") and is_on(settings, "bf16_full_eval"):
        yield "fp16_full_eval and bf16_full_eval cannot both be on."
    if device == "cpu" and is_on(settings, "tf32"):
        yield "tf32 needs an NVIDIA GPU of the Ampere generation or newer."


def _importance_sampling(settings: Settings) -> Iterator[str]:
    low = value_of(settings, "vllm_importance_sampling_clip_min")
    high: object = settings.get("vllm_importance_sampling_cap")
    if high is None:
        high = value_of(settings, "vllm_importance_sampling_clip_max")
    if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
        yield (
            f"vllm_importance_sampling_clip_min ({low}) must be less than"
            f" vllm_importance_sampling_clip_max ({high})."
        )
    mode = value_of(settings, "vllm_importance_sampling_mode")
    truncates = mode in ("token_truncate", "sequence_truncate")
    corrects = is_on(settings, "vllm_importance_sampling_correction")
    if truncates and corrects and low is None and high is None:
        yield (
            f"vllm_importance_sampling_mode {mode!r} needs vllm_importance_sampling_clip_min or"
            " _clip_max."
        )


def _values(settings: Settings) -> Iterator[str]:
    if is_on(settings, "auto_find_batch_size"):
        yield (
            "auto_find_batch_size is not supported by GRPO: a shrunk batch would break the groups."
        )
    repository = value_of(settings, "log_completions_hub_repo")
    if repository is not None and not is_on(settings, "log_completions"):
        yield "log_completions_hub_repo needs log_completions: true."
    every = value_of(settings, "torch_empty_cache_steps")
    if every is not None and not (isinstance(every, int) and every > 0):
        yield f"torch_empty_cache_steps must be a whole number above 0, and is {every!r}."
    for name in ENUMERATIONS:
        value = value_of(settings, name)
        choices = fields()[name].choices
        if value not in choices:
            yield f"{name} must be one of {', '.join(choices)}, and is {value!r}."
    prefetches = value_of(settings, "dataloader_prefetch_factor") is not None
    if prefetches and number_of(settings, "dataloader_num_workers") == 0:
        yield "dataloader_prefetch_factor needs dataloader_num_workers above 0."

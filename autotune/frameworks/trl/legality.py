"""Legality rules of TRL, checked without its code.

`config_refusals` are the rules of GRPOConfig: a property test constructs the real class at world
sizes 1 to 8 and compares. `other_refusals` are rules of trainer, engine and learning, which
GRPOConfig does not check.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from autotune.core.job import Task
from autotune.frameworks.base import Settings, count_of, other_global_batch
from autotune.frameworks.trl import combinations
from autotune.frameworks.trl.combinations import get
from autotune.frameworks.trl.field_list import fields
from autotune.frameworks.trl.settings import SCORING_TASK, ranks_of

GRPO_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
POSITIVE_COUNTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "max_new_tokens",
    "max_completion_length",
    "max_prompt_length",
    "vllm_tensor_parallel_size",
    "lora_r",
)
ENUMERATIONS = (
    "optim",
    "eval_strategy",
    "save_strategy",
    "logging_strategy",
    "lr_scheduler_type",
    "hub_strategy",
)


def number(settings: Settings, name: str) -> int:
    value = get(settings, name)
    return value if isinstance(value, int) else 0


def why_illegal(settings: Settings, task: Task, method: str = "grpo") -> str | None:
    """Return the first broken rule with its values."""
    if method in _RULES:
        rules: Iterable[Callable[[Settings, Task], Iterator[str]]] = (
            *_RULES[method],
            combinations.refusals,
        )
        own = itertools.chain(
            _value_refusals(settings, method), *(rule(settings, task) for rule in rules)
        )
    else:
        ranks = max(1, ranks_of(settings, task.hardware.count))
        own = itertools.chain(
            config_refusals(settings, ranks, task.hardware.kind), other_refusals(settings, task)
        )
    return next(itertools.chain(_common_refusals(settings, task), own), None)


def _common_refusals(settings: Settings, task: Task) -> Iterator[str]:
    # 1. Counts below one. GRPOConfig accepts some of them.
    for name in POSITIVE_COUNTS:
        value = settings.get(name)
        if name in settings and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            yield f"{name} must be a whole number of at least 1, and is {value!r}."
    # 2. Rewards.
    user = task.workload.user_settings
    weights, rewards = user.get("reward_weights"), user.get("reward_funcs")
    if isinstance(weights, list) and isinstance(rewards, list) and len(weights) != len(rewards):
        yield (
            f"reward_weights has {len(weights)} values for {len(rewards)} reward_funcs: each needs"
            " one."
        )
    # 3. Rows with images: an image's tokens can't be cut, and its rows are not packed.
    images = task.workload.images
    if images is None:
        return
    for name in ("packing", "padding_free"):
        if settings.get(name):
            yield f"{name} does not work with images."
    offline = task.workload.method == "sft"
    name = "max_length" if offline else "max_prompt_length"
    longest = settings.get(name)
    if isinstance(longest, int) and longest <= images.row_tokens:
        yield (
            f"{name} is {longest}, and the images of a row alone have {images.row_tokens} tokens,"
            f" which can't be cut: raise it{', or set max_length=null' if offline else ''}, or take"
            " smaller images."
        )


def config_refusals(settings: Settings, ranks: int, device: str) -> Iterator[str]:
    """Yield broken rules of GRPOConfig, as of the newest supported TRL."""
    yield from _generation_batch(settings, ranks)
    # 1. Evaluation.
    batch = number(settings, "per_device_eval_batch_size")
    generations = number(settings, "num_generations_eval") or number(settings, "num_generations")
    if get(settings, "eval_strategy") != "no" and (
        generations == 0 or (batch * ranks) % generations
    ):
        yield (
            f"the evaluation batch (per_device_eval_batch_size {batch} x {ranks} ranks) must be"
            f" divisible by the generations of an evaluation ({generations})."
        )
    # 2. Precision.
    fp16, bf16 = bool(get(settings, "fp16")), get(settings, "bf16")
    bf16 = not fp16 if bf16 is None else bool(bf16)
    if fp16 and bf16:
        yield "fp16 and bf16 cannot both be on."
    if (
        device == "cpu"
        and not get(settings, "use_cpu")
        and (bf16 or get(settings, "bf16_full_eval"))
    ):
        yield "bf16 without a GPU needs use_cpu: true."
    if get(settings, "fp16_full_eval") and get(settings, "bf16_full_eval"):
        yield "fp16_full_eval and bf16_full_eval cannot both be on."
    if device == "cpu" and get(settings, "tf32"):
        yield "tf32 needs an NVIDIA GPU of the Ampere generation or newer."
    # 3. Importance sampling.
    low, high = (
        get(settings, "vllm_importance_sampling_clip_min"),
        get(settings, "vllm_importance_sampling_clip_max"),
    )
    cap = settings.get("vllm_importance_sampling_cap")
    high = high if cap is None else cap
    if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
        yield (
            f"vllm_importance_sampling_clip_min ({low}) must be less than"
            f" vllm_importance_sampling_clip_max ({high})."
        )
    mode = get(settings, "vllm_importance_sampling_mode")
    truncates = mode in ("token_truncate", "sequence_truncate") and get(
        settings, "vllm_importance_sampling_correction"
    )
    if truncates and low is None and high is None:
        yield (
            f"vllm_importance_sampling_mode {mode!r} needs vllm_importance_sampling_clip_min or"
            " _clip_max."
        )
    yield from _values(settings)


def _generation_batch(settings: Settings, ranks: int) -> Iterator[str]:
    batch, steps = settings.get("generation_batch_size"), settings.get("steps_per_generation")
    micro, generations = (
        number(settings, "per_device_train_batch_size"),
        get(settings, "num_generations"),
    )
    if batch is not None and steps is not None:
        yield (
            f"generation_batch_size ({batch}) and steps_per_generation ({steps}) cannot both be"
            " set."
        )
        return
    if isinstance(batch, int) and (micro * ranks == 0 or batch % (micro * ranks)):
        yield (
            f"generation_batch_size ({batch}) must be divisible by per_device_train_batch_size x"
            f" ranks ({micro} x {ranks} = {micro * ranks})."
        )
        return
    if not isinstance(generations, int) or generations < 2:
        yield (
            "num_generations must be at least 2, to compare completions of a prompt, and is"
            f" {generations!r}."
        )
        return
    steps = number(settings, "gradient_accumulation_steps") if steps is None else steps
    total = (
        batch
        if isinstance(batch, int)
        else micro * ranks * (steps if isinstance(steps, int) else 0)
    )
    if total % generations:
        yield (
            f"the generation batch ({total} = per_device_train_batch_size {micro} x {ranks} ranks x"
            f" steps_per_generation {total // (micro * ranks or 1)}) must be divisible by"
            f" num_generations ({generations}): groups must be whole."
        )


def _values(settings: Settings) -> Iterator[str]:
    if get(settings, "auto_find_batch_size"):
        yield (
            "auto_find_batch_size is not supported by GRPO: a shrunk batch would break the groups."
        )
    if get(settings, "log_completions_hub_repo") is not None and not get(
        settings, "log_completions"
    ):
        yield "log_completions_hub_repo needs log_completions: true."
    every = get(settings, "torch_empty_cache_steps")
    if every is not None and not (isinstance(every, int) and every > 0):
        yield f"torch_empty_cache_steps must be a whole number above 0, and is {every!r}."
    for name in ENUMERATIONS:
        value = get(settings, name)
        if value not in fields()[name].choices:
            yield f"{name} must be one of {', '.join(fields()[name].choices)}, and is {value!r}."
    if (
        number(settings, "dataloader_num_workers") == 0
        and get(settings, "dataloader_prefetch_factor") is not None
    ):
        yield "dataloader_prefetch_factor needs dataloader_num_workers above 0."


def other_refusals(settings: Settings, task: Task) -> Iterator[str]:
    """Yield broken rules that GRPOConfig does not check."""
    for rule in (_global_batch, _device, _loss, _adapter, _engine, combinations.refusals):
        yield from rule(settings, task)


def _value_refusals(settings: Settings, method: str) -> Iterator[str]:
    """Yield values that the method's own configuration class rejects."""
    if settings.get("fp16") and settings.get("bf16"):
        yield "fp16 and bf16 cannot both be on."
    known = fields(method)
    for name in (name for name in ENUMERATIONS if name in known and name in settings):
        if settings[name] not in known[name].choices:
            yield (
                f"{name} must be one of {', '.join(known[name].choices)}, and is"
                f" {settings[name]!r}."
            )


def _pairs(settings: Settings, task: Task) -> Iterator[str]:
    """Yield broken rules of online DPO: two completions per prompt, both within `max_length`."""
    held, ranks = task.workload.global_batch, ranks_of(settings, task.hardware.count)
    micro, steps = (
        number(settings, "per_device_train_batch_size"),
        number(settings, "gradient_accumulation_steps"),
    )
    if held is not None and 2 * micro * ranks * steps != held:
        yield (
            f"the global batch is held at {held} completions, and 2 to each of"
            f" per_device_train_batch_size {micro} x {ranks} ranks x gradient_accumulation_steps"
            f" {steps} prompts make {2 * micro * ranks * steps}."
        )
    longest, completion = settings.get("max_length"), number(settings, "max_new_tokens")
    if isinstance(longest, int) and longest <= completion:
        yield (
            f"max_length ({longest}) must be above max_new_tokens ({completion}): a row would"
            " contain no prompt."
        )
    if settings.get("use_vllm"):
        yield "online DPO supports only transformers' generation: use_vllm must be off."


def _offloading(settings: Settings, task: Task) -> Iterator[str]:
    if settings.get("activation_offloading") and task.hardware.kind == "cpu":
        yield "activation_offloading copies activations from a GPU to the host: it needs a GPU."


def _global_batch(settings: Settings, task: Task) -> Iterator[str]:
    micro, steps = (
        number(settings, "per_device_train_batch_size"),
        number(settings, "gradient_accumulation_steps"),
    )
    ranks = ranks_of(settings, task.hardware.count)
    product = (
        f"per_device_train_batch_size {micro} x {ranks} ranks x gradient_accumulation_steps {steps}"
    )
    yield from other_global_batch(task, product, micro * ranks * steps)


def _device(settings: Settings, task: Task) -> Iterator[str]:
    on_cpu = task.hardware.kind == "cpu"
    if on_cpu and (get(settings, "fp16") or get(settings, "dtype") == "float16"):
        yield "fp16 needs a GPU: a CPU computes in float32 or bfloat16."
    if bool(get(settings, "use_cpu")) != on_cpu:
        yield f"use_cpu is {get(settings, 'use_cpu')}, but the request is for {task.hardware}."
    if on_cpu and (get(settings, "load_in_4bit") or get(settings, "load_in_8bit")):
        yield "4-bit and 8-bit weights need a GPU."
    window = count_of(settings, "max_prompt_length") + number(settings, "max_completion_length")
    if (longest := _positions(task)) is not None and window > longest:
        yield (
            f"longest prompt plus longest completion ({window} tokens) exceed the model's {longest}"
            " positions."
        )


def _positions(task: Task) -> int | None:
    """Return the model's number of positions; None: unknown, or extended by RoPE scaling."""
    config = task.workload.model.config
    return (
        None if config.get("rope_scaling") else count_of(config, "max_position_embeddings") or None
    )


def _loss(settings: Settings, task: Task) -> Iterator[str]:
    loss = get(settings, "loss_type")
    if loss not in GRPO_LOSSES:
        yield f"loss_type must be one of {', '.join(GRPO_LOSSES)}, and is {loss!r}."
    mode = get(settings, "vllm_importance_sampling_mode")
    corrected = get(settings, "use_vllm") and get(settings, "vllm_importance_sampling_correction")
    if loss == "vespo" and corrected and mode not in ("token_truncate", "token_mask"):
        yield (
            "loss_type vespo needs vllm_importance_sampling_mode token_truncate or token_mask, not"
            f" {mode!r}."
        )
    if get(settings, "sync_ref_model") and get(settings, "beta") == 0.0:
        yield "sync_ref_model needs a reference model, so beta above 0."
    if get(settings, "sync_ref_model") and get(settings, "use_peft"):
        yield "sync_ref_model works only with full tuning."


def _adapter(settings: Settings, task: Task) -> Iterator[str]:
    four, eight = get(settings, "load_in_4bit"), get(settings, "load_in_8bit")
    if four and eight:
        yield "load_in_4bit and load_in_8bit cannot both be on."
    if (four or eight) and not get(settings, "use_peft"):
        yield "quantised weights can only be trained through an adapter: use_peft must be on."
    if eight and get(settings, "use_vllm"):
        yield "vLLM cannot load 8-bit weights from TRL; use load_in_4bit."


def _engine(settings: Settings, task: Task) -> Iterator[str]:
    if not get(settings, "use_vllm"):
        return
    if get(settings, "vllm_mode") not in ("colocate", "server"):
        yield f"vllm_mode must be colocate or server, and is {get(settings, 'vllm_mode')!r}."
    if get(settings, "vllm_enable_sleep_mode") and task.hardware.kind == "cpu":
        yield "vllm_enable_sleep_mode needs a GPU."
    parallel, ranks = (
        number(settings, "vllm_tensor_parallel_size"),
        ranks_of(settings, task.hardware.count),
    )
    if parallel == 0 or ranks % parallel:
        yield f"vllm_tensor_parallel_size ({parallel}) must divide the {ranks} ranks evenly."
    share = get(settings, "vllm_gpu_memory_utilization")
    if not isinstance(share, int | float) or not 0 < share <= 1:
        yield f"vllm_gpu_memory_utilization must be above 0 and at most 1, and is {share!r}."
    window = settings.get("vllm_max_model_length")
    prompt, completion = (
        settings.get("max_prompt_length"),
        number(settings, "max_completion_length"),
    )
    if isinstance(window, int) and isinstance(prompt, int) and window < prompt + completion:
        yield (
            f"vllm_max_model_length ({window}) must be at least max_prompt_length +"
            f" max_completion_length ({prompt} + {completion} = {prompt + completion})."
        )
    if isinstance(window, int) and (longest := _positions(task)) is not None and window > longest:
        yield f"vllm_max_model_length ({window}) exceeds the model's {longest} positions."


_OFFLINE = (_global_batch, _device, _offloading, _adapter)


def _pairs_of_neighbours(settings: Settings, task: Task) -> Iterator[str]:
    if (
        number(settings, "per_device_train_batch_size") < 2
        and settings.get("loss_type") != "apo_zero_unpaired"
    ):
        yield (
            "per_device_train_batch_size must be at least 2: KTO's loss pairs each prompt with its"
            " neighbour's answer. Only loss_type apo_zero_unpaired works with 1."
        )


def _scored(settings: Settings, task: Task) -> Iterator[str]:
    if get(settings, "use_peft") and settings.get("lora_task_type") != SCORING_TASK:
        yield (
            f"an adapter of a reward model needs lora_task_type {SCORING_TASK}; PEFT's default"
            " wraps a model that generates."
        )


_RULES: Mapping[str, tuple[Callable[[Settings, Task], Iterator[str]], ...]] = {
    "sft": _OFFLINE,
    "dpo": _OFFLINE,
    "kto": (_pairs_of_neighbours, *_OFFLINE),
    "reward": (*_OFFLINE, _scored),
    "online-dpo": (_pairs, _device, _adapter),
}
"""Rules of the methods without GRPOConfig."""

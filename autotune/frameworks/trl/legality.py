"""Legality rules of TRL, checked without its code.

`why_illegal` collects them: common rules, those of GRPOConfig (`grpo_config_rules`), those of
trainer, engine and learning, and those of the other methods. Sharding, quantisation and generation
are in `combinations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autotune.core.dataset import Images
from autotune.core.job import Task
from autotune.core.units import counted
from autotune.frameworks.base import Settings, count_of, other_global_batch
from autotune.frameworks.trl import combinations
from autotune.frameworks.trl.adapter_settings import SCORING_TASK
from autotune.frameworks.trl.field_list import fields, is_on, number_of, value_of
from autotune.frameworks.trl.grpo_config_rules import ENUMERATIONS, config_refusals
from autotune.frameworks.trl.settings import ranks_of

LegalityRule = Callable[[Settings, Task], Iterator[str]]

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


def why_illegal(
    settings: Settings,
    task: Task,
    method: str = "grpo",
) -> str | None:
    """Return the first broken rule with its values."""
    return next(_refusals(settings, task, method), None)


def _refusals(
    settings: Settings,
    task: Task,
    method: str,
) -> Iterator[str]:
    yield from _counts(settings)
    yield from _lists(settings, method)
    yield from _rewards(task)
    if task.workload.images is not None:
        yield from _image_rows(settings, task, task.workload.images)
    if method not in _RULES:
        ranks = max(1, ranks_of(settings, task.hardware.count))
        yield from config_refusals(settings, ranks, task.hardware.kind)
        yield from other_refusals(settings, task)
        return
    yield from _config_values(settings, method)
    for rule in (*_RULES[method], combinations.refusals):
        yield from rule(settings, task)


def other_refusals(settings: Settings, task: Task) -> Iterator[str]:
    """Yield broken rules of GRPO that GRPOConfig does not check."""
    for rule in (_global_batch, _device, _loss, _adapter, _engine, combinations.refusals):
        yield from rule(settings, task)


# 1. Rules of every method.


def _counts(settings: Settings) -> Iterator[str]:
    """Yield counts below one. GRPOConfig accepts some of them."""
    for name in POSITIVE_COUNTS:
        if name not in settings:
            continue
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"{name} must be a whole number of at least 1, and is {value!r}."


def _lists(settings: Settings, method: str) -> Iterator[str]:
    """Yield texts in place of lists, which --set does not read."""
    accepted = fields(method)
    for name, value in settings.items():
        if name not in accepted or "list" not in accepted[name].kinds:
            continue
        if isinstance(value, str) and value.startswith("["):
            yield (
                f"{name}={value} is a text, not a list. Write the list in TRL's YAML file, and"
                f" name that with --config: `{name}: {value}`."
            )


def _rewards(task: Task) -> Iterator[str]:
    weights = task.workload.user_settings.get("reward_weights")
    rewards = task.workload.user_settings.get("reward_funcs")
    if not isinstance(weights, list) or not isinstance(rewards, list):
        return
    if len(weights) != len(rewards):
        yield (
            f"reward_weights has {counted(len(weights), 'value')}, and reward_funcs has"
            f" {counted(len(rewards), 'function')}: each needs one."
        )


def _image_rows(
    settings: Settings,
    task: Task,
    images: Images,
) -> Iterator[str]:
    """Yield refusals of rows with images: their tokens can't be cut, and they are not packed."""
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


# 2. Rules of GRPO and others that GRPOConfig does not check.


def _global_batch(settings: Settings, task: Task) -> Iterator[str]:
    micro, steps = _batch_shape(settings)
    ranks = ranks_of(settings, task.hardware.count)
    product = (
        f"per_device_train_batch_size {micro} x {ranks} ranks x gradient_accumulation_steps {steps}"
    )
    yield from other_global_batch(task, product, micro * ranks * steps)


def _batch_shape(settings: Settings) -> tuple[int, int]:
    """Return the micro-batch and the accumulation."""
    micro = number_of(settings, "per_device_train_batch_size")
    return micro, number_of(settings, "gradient_accumulation_steps")


def _device(settings: Settings, task: Task) -> Iterator[str]:
    on_cpu = task.hardware.kind == "cpu"
    if on_cpu and (is_on(settings, "fp16") or value_of(settings, "dtype") == "float16"):
        yield "fp16 needs a GPU: a CPU computes in float32 or bfloat16."
    if is_on(settings, "use_cpu") != on_cpu:
        yield f"use_cpu is {value_of(settings, 'use_cpu')}, but the request is for {task.hardware}."
    if on_cpu and combinations.loads_quantised(settings):
        yield "4-bit and 8-bit weights need a GPU."
    completion = number_of(settings, "max_completion_length")
    window = count_of(settings, "max_prompt_length") + completion
    positions = _positions(task)
    has_table = is_on(settings, "use_vllm") or not _is_rotary(task)
    if positions is not None and window > positions and has_table:
        yield (
            f"longest prompt plus longest completion ({window} tokens) exceed the model's"
            f" {positions} positions."
        )


def _positions(task: Task) -> int | None:
    """Return the model's number of positions; None: unknown, or extended by RoPE scaling."""
    model = task.workload.model
    if model.config.get("rope_scaling") or model.is_assumed:
        return None
    return count_of(model.config, "max_position_embeddings") or None


def _is_rotary(task: Task) -> bool:
    """Return True for rotary embeddings, which have no table of positions: only vLLM refuses
    longer rows.
    """
    config = task.workload.model.config
    return "rope_theta" in config or "rope_parameters" in config


def _loss(settings: Settings, task: Task) -> Iterator[str]:
    loss = value_of(settings, "loss_type")
    if loss not in GRPO_LOSSES:
        yield f"loss_type must be one of {', '.join(GRPO_LOSSES)}, and is {loss!r}."
    mode = value_of(settings, "vllm_importance_sampling_mode")
    corrects = is_on(settings, "use_vllm") and is_on(
        settings, "vllm_importance_sampling_correction"
    )
    if loss == "vespo" and corrects and mode not in ("token_truncate", "token_mask"):
        yield (
            "loss_type vespo needs vllm_importance_sampling_mode token_truncate or token_mask, not"
            f" {mode!r}."
        )
    if not is_on(settings, "sync_ref_model"):
        return
    if value_of(settings, "beta") == 0.0:
        yield "sync_ref_model needs a reference model, so beta above 0."
    if is_on(settings, "use_peft"):
        yield "sync_ref_model works only with full tuning."


def _adapter(settings: Settings, task: Task) -> Iterator[str]:
    four_bits = is_on(settings, "load_in_4bit")
    eight_bits = is_on(settings, "load_in_8bit")
    if four_bits and eight_bits:
        yield "load_in_4bit and load_in_8bit cannot both be on."
    if (four_bits or eight_bits) and not is_on(settings, "use_peft"):
        yield "quantised weights can only be trained through an adapter: use_peft must be on."
    if eight_bits and is_on(settings, "use_vllm"):
        yield "vLLM cannot load 8-bit weights from TRL; use load_in_4bit."


def _engine(settings: Settings, task: Task) -> Iterator[str]:
    if not is_on(settings, "use_vllm"):
        return
    # 1. Mode, GPUs and memory.
    mode = value_of(settings, "vllm_mode")
    if mode not in ("colocate", "server"):
        yield f"vllm_mode must be colocate or server, and is {mode!r}."
    if is_on(settings, "vllm_enable_sleep_mode") and task.hardware.kind == "cpu":
        yield "vllm_enable_sleep_mode needs a GPU."
    parallel = number_of(settings, "vllm_tensor_parallel_size")
    ranks = ranks_of(settings, task.hardware.count)
    if parallel == 0 or ranks % parallel:
        yield f"vllm_tensor_parallel_size ({parallel}) must divide the {ranks} ranks evenly."
    share = value_of(settings, "vllm_gpu_memory_utilization")
    if not isinstance(share, int | float) or not 0 < share <= 1:
        yield f"vllm_gpu_memory_utilization must be above 0 and at most 1, and is {share!r}."
    # 2. Window.
    window = settings.get("vllm_max_model_length")
    if not isinstance(window, int):
        return
    prompt = settings.get("max_prompt_length")
    completion = number_of(settings, "max_completion_length")
    if isinstance(prompt, int) and window < prompt + completion:
        yield (
            f"vllm_max_model_length ({window}) must be at least max_prompt_length +"
            f" max_completion_length ({prompt} + {completion} = {prompt + completion})."
        )
    positions = _positions(task)
    if positions is not None and window > positions:
        yield f"vllm_max_model_length ({window}) exceeds the model's {positions} positions."


# 3. Rules of the other methods.


def _config_values(settings: Settings, method: str) -> Iterator[str]:
    """Yield values that the method's own configuration class rejects."""
    if settings.get("fp16") and settings.get("bf16"):
        yield "fp16 and bf16 cannot both be on."
    accepted = fields(method)
    for name in ENUMERATIONS:
        if name not in accepted or name not in settings:
            continue
        choices = accepted[name].choices
        if settings[name] not in choices:
            yield f"{name} must be one of {', '.join(choices)}, and is {settings[name]!r}."


def _offloading(settings: Settings, task: Task) -> Iterator[str]:
    if settings.get("activation_offloading") and task.hardware.kind == "cpu":
        yield "activation_offloading copies activations from a GPU to the host: it needs a GPU."


def _pairs_of_neighbours(settings: Settings, task: Task) -> Iterator[str]:
    if settings.get("loss_type") == "apo_zero_unpaired":
        return
    if number_of(settings, "per_device_train_batch_size") < 2:
        yield (
            "per_device_train_batch_size must be at least 2: KTO's loss pairs each prompt with its"
            " neighbour's answer. Only loss_type apo_zero_unpaired works with 1."
        )


def _scored(settings: Settings, task: Task) -> Iterator[str]:
    if is_on(settings, "use_peft") and settings.get("lora_task_type") != SCORING_TASK:
        yield (
            f"an adapter of a reward model needs lora_task_type {SCORING_TASK}; PEFT's default"
            " wraps a model that generates."
        )


def _completion_pairs(settings: Settings, task: Task) -> Iterator[str]:
    """Yield broken rules of online DPO: two completions per prompt, both within `max_length`."""
    global_batch = task.workload.global_batch
    micro, steps = _batch_shape(settings)
    ranks = ranks_of(settings, task.hardware.count)
    completions = 2 * micro * ranks * steps
    if global_batch is not None and completions != global_batch:
        yield (
            f"the global batch is held at {global_batch} completions, and 2 to each of"
            f" per_device_train_batch_size {micro} x {ranks} ranks x gradient_accumulation_steps"
            f" {steps} prompts make {completions}."
        )
    longest = settings.get("max_length")
    completion = number_of(settings, "max_new_tokens")
    if isinstance(longest, int) and longest <= completion:
        yield (
            f"max_length ({longest}) must be above max_new_tokens ({completion}): a row would"
            " contain no prompt."
        )
    if settings.get("use_vllm"):
        yield "online DPO supports only transformers' generation: use_vllm must be off."


_OFFLINE_RULES = (_global_batch, _device, _offloading, _adapter)
_RULES: Mapping[str, tuple[LegalityRule, ...]] = {
    "sft": _OFFLINE_RULES,
    "dpo": _OFFLINE_RULES,
    "kto": (_pairs_of_neighbours, *_OFFLINE_RULES),
    "reward": (*_OFFLINE_RULES, _scored),
    "online-dpo": (_completion_pairs, _device, _adapter),
}
"""Rules of the methods without GRPOConfig."""

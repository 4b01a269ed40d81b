"""Rules of TRL's asynchronous GRPO: its attention kernel, what it sends to the server, its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.core.job import Task
from autotune.frameworks.base import Settings, count_of, other_global_batch
from autotune.frameworks.trl import combinations
from autotune.frameworks.trl.field_list import fields
from autotune.frameworks.trl.packed_rows import (
    nearest_accumulation,
    rollouts_per_step,
    token_budget,
    window,
)
from autotune.frameworks.trl.settings import ranks_of, sharding_of

ASYNC_COUNTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "max_completion_length",
    "max_prompt_length",
    "weight_sync_steps",
)
SENT_SHARDINGS = ("none", "ddp", "fsdp2")
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
RECURRENT_SIZES = ("linear_num_value_heads", "mamba_d_state", "linear_attn_config")
"""Sizes in a model's configuration that only recurrent layers have."""

KERNEL_FROM = 8.0
KERNEL_BELOW = 10.0
LARGEST_HEAD = 256
"""Compute capabilities with a build of `kernels-community/flash-attn3` (its build.toml: 8.0 and
9.0a).
"""


def refusals(settings: Settings, task: Task) -> Iterator[str]:
    """Yield broken rules."""
    yield from _devices(settings, task)
    yield from _layers(_language_config(task))
    yield from _training(settings, task)
    yield from _batch(settings, task)
    yield from combinations.refusals(settings, task)


# 1. The trainer's only attention kernel.


def _devices(settings: Settings, task: Task) -> Iterator[str]:
    """Yield devices and precisions for which the kernel has no build."""
    if task.hardware.kind == "cpu":
        yield (
            "AsyncGRPOTrainer needs GPUs: its attention is a kernel for them (flash-attn3), and"
            " weights are sent over NCCL."
        )
    elif task.hardware.count < 2:
        yield (
            "AsyncGRPOTrainer needs a vLLM server on GPUs of its own, so at least 2 GPUs. Use"
            " --method grpo on one."
        )
    capability = combinations.compute_capability(task)
    if capability and not KERNEL_FROM <= float(capability) < KERNEL_BELOW:
        yield (
            "AsyncGRPOTrainer's attention is kernels-community/flash-attn3, which is built for"
            f" compute capability 8 and 9; {task.hardware.name} has {capability}. Use --method grpo"
            " with vllm_mode=server."
        )
    if not combinations.computes_in_half(settings):
        yield (
            "AsyncGRPOTrainer's attention kernel computes in bfloat16 or float16 only: bf16 must"
            " be on."
        )


def _layers(config: Mapping[str, object]) -> Iterator[str]:
    """Yield layers of the model that the kernel lacks."""
    size = count_of(config, "head_dim")
    heads = count_of(config, "num_attention_heads")
    if not size and heads:
        size = count_of(config, "hidden_size") // heads
    if size > LARGEST_HEAD or size % 8:
        yield (
            f"AsyncGRPOTrainer's attention kernel takes heads of at most {LARGEST_HEAD}, a multiple"
            f" of 8, and not of {size}."
        )
    if count_of(config, "kv_lora_rank"):
        yield (
            "AsyncGRPOTrainer's attention kernel has no backward pass for keys and values of"
            " different sizes (MLA)."
        )
    types = config.get("layer_types")
    is_recurrent = any(config.get(name) for name in RECURRENT_SIZES)
    if isinstance(types, list | tuple) and not ATTENTION_LAYERS.issuperset(types):
        is_recurrent = True
    if is_recurrent:
        yield (
            "AsyncGRPOTrainer refuses recurrent layers: a row holds several rollouts, and they"
            " would see each other."
        )
    if config.get("model_type") == "gpt_oss":
        yield "AsyncGRPOTrainer refuses attention sinks, which its kernel lacks."


def _language_config(task: Task) -> Mapping[str, object]:
    """Return the configuration of the language model, also of one with images."""
    config = task.workload.model.config
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


# 2. Training, and the weights that are sent.


def _training(settings: Settings, task: Task) -> Iterator[str]:
    # 1. Sharding.
    ranks = ranks_of(settings, task.hardware.count)
    sharding = sharding_of(settings, ranks)
    if sharding not in SENT_SHARDINGS:
        yield (
            f"AsyncGRPOTrainer sends weights of ddp and fsdp2 only, and sharding is {sharding}. Use"
            " sharding=fsdp2."
        )
    if sharding == "fsdp2" and ranks == 1:
        yield (
            "sharding=fsdp2 divides the model over the GPUs that train, and there is one. Use"
            " sharding=ddp."
        )

    # 2. Weights, adapters and the head.
    if settings.get("use_liger_kernel"):
        yield "AsyncGRPOTrainer refuses use_liger_kernel: its own head keeps no logits either."
    if combinations.loads_quantised(settings) or combinations.quantisation(task):
        yield (
            "quantised weights are not modelled with AsyncGRPOTrainer, which sends whole weights."
            " Use --tuning lora."
        )
    user = task.workload.user_settings
    targets = settings.get("lora_target_modules") or user.get("lora_target_modules")
    if "lm_head" in str(targets):
        yield (
            "AsyncGRPOTrainer refuses an adapter on lm_head, whose base weight it reads. Leave it"
            " out of lora_target_modules."
        )

    # 3. Precision and optimizer.
    if settings.get("fp16") and settings.get("bf16"):
        yield "fp16 and bf16 cannot both be on."
    optimizers = fields("async-grpo")["optim"].choices
    if settings.get("optim") not in optimizers:
        yield f"optim must be one of {', '.join(optimizers)}, and is {settings.get('optim')!r}."


# 3. Rows and the global batch.


def _batch(settings: Settings, task: Task) -> Iterator[str]:
    # 1. Counts, and the row that rollouts must fit into.
    budget = token_budget(settings)
    longest = window(settings)
    for name in ASYNC_COUNTS:
        if count_of(settings, name) < 1:
            yield f"{name} must be a whole number of at least 1, and is {settings.get(name)!r}."
    if not count_of(settings, "max_inflight_tasks"):
        yield (
            "max_inflight_tasks (0) leaves the trainer without rollouts. Use -1 for TRL's default,"
            " or a number."
        )
    if budget and budget < longest:
        yield (
            f"token_budget ({budget}) must be at least longest prompt + longest completion"
            f" ({longest}): TRL drops rollouts that do not fit into a row."
        )
    config = _language_config(task)
    positions = count_of(config, "max_position_embeddings")
    if positions and longest > positions and not config.get("rope_scaling"):
        yield (
            f"longest prompt plus longest completion ({longest} tokens) exceed the model's"
            f" {positions} positions."
        )
    # 2. The global batch.
    ranks = ranks_of(settings, task.hardware.count)
    if ranks < 1:
        return  # said by the rules of the server
    steps = count_of(settings, "gradient_accumulation_steps")
    rollouts = rollouts_per_step(settings, ranks)
    micro = f"per_device_train_batch_size {rollouts}"
    if budget:
        requested = task.workload.global_batch or 0
        if steps == nearest_accumulation(requested, rollouts * ranks):
            return
        micro = f"{rollouts} completions in a full row"
    product = f"{micro} x {ranks} ranks x gradient_accumulation_steps {steps}"
    yield from other_global_batch(task, product, rollouts * ranks * steps)

"""TRL's asynchronous GRPO: settings, rules, trace and composition.

Written for `trl.experimental.async_grpo` of TRL 1.16: a trainer, and vLLM's own server (`vllm
serve`) on GPUs that do not train. What is traced is one row of rollouts, the fullest that can
occur.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

from autotune.core.composition import Composition, SplitEngines
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate, Knobs, KnobValue
from autotune.frameworks.base import Settings, count_of, other_global_batch
from autotune.frameworks.stand_in_step import SHARE, served
from autotune.frameworks.trl import combinations, requests
from autotune.frameworks.trl import settings as trl_settings
from autotune.frameworks.trl.field_list import fields
from autotune.frameworks.trl.requests import NEW_BUFFERS
from autotune.frameworks.trl.settings import (
    SERVER,
    ranks_of,
    server_gpus,
    server_parallel,
    sharding_of,
)
from autotune.frameworks.trl.trainers import ACCUMULATION, MAX_DEFAULT_ACCUMULATION, TrlScripted
from autotune.machine import hardware_detection

ASYNC_GRPO = "async-grpo"
SERVED: Mapping[str, KnobValue] = {
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_gpu_memory_utilization": SHARE,
}
"""Settings of TRL's other trainers that this one always has: a server with vLLM's default share."""

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

KERNEL_FROM, KERNEL_BELOW, LARGEST_HEAD = 8.0, 10.0, 256
"""Compute capabilities with a build of `kernels-community/flash-attn3` (its build.toml: 8.0 and
9.0a).
"""

NOT_IN_STEP = frozenset(
    {"token_budget", "max_inflight_tasks", "max_staleness", "weight_sync_steps", "queue_maxsize"}
)
"""Settings without effect on the training of one row."""


class TrlAsyncGrpo(TrlScripted):
    """Rollouts of a vLLM server on GPUs of its own, trained on as they arrive."""

    method = space = ASYNC_GRPO
    requires: Mapping[str, str] = {"trl": "trl>=1.16,<1.17"}
    completions_each = 0

    def ranks(self, settings: Settings, gpus: int) -> int:
        return ranks_of({**settings, **SERVED}, gpus)

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        """Return the candidate of these knobs; a knob of None is derived from the others."""
        given = {
            **task.workload.held,
            **{name: value for name, value in knobs.items() if value is not None},
        }
        defaults = {
            name: trl_settings.default(name, ASYNC_GRPO)
            for name in trl_settings.ALWAYS_STATED[ASYNC_GRPO]
            if name not in given
        }
        settings: dict[str, KnobValue] = {"server_gpus": 1, **given, **defaults, **SERVED}
        settings.setdefault("max_prompt_length", trl_settings.DEFAULT_PROMPT_LENGTH)
        settings["vllm_max_model_length"] = window(settings)
        if ACCUMULATION not in given:
            ranks = max(1, ranks_of(settings, task.hardware.count))
            settings[ACCUMULATION] = trl_settings.accumulation(
                completions_each_step(settings, ranks) * ranks, task, ASYNC_GRPO
            )
        settings |= trl_settings.precision(given, task) | trl_settings.adapter_settings(given, task)
        dtype = given.get("dtype", trl_settings.default("dtype", ASYNC_GRPO))
        settings["dtype"] = trl_settings.loaded_dtype(dtype, task.workload.model.config)
        settings = {
            name: value for name, value in settings.items() if trl_settings.is_read(name, settings)
        }
        load = trl_settings.loaded(
            settings, task, ("dtype", "use_peft", *trl_settings.LORA_SETTINGS, *SERVER)
        )
        return Candidate(knobs=knobs, settings=settings, load=load)

    def why_illegal(self, candidate: Candidate, task: Task) -> str | None:
        rules = (_attention, _training, _batch, combinations.refusals)
        return next((text for rule in rules for text in rule(candidate.settings, task)), None)

    def batch_shapes(self, task: Task) -> Iterator[dict[str, KnobValue]]:
        """Yield the accumulation alone, fewest first: it makes the global batch, whatever fills
        a row.
        """
        held = task.workload.held.get(ACCUMULATION)
        for steps in [held] if held is not None else range(1, MAX_DEFAULT_ACCUMULATION + 1):
            yield {ACCUMULATION: steps}

    def load_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        """Leave the server out, and its GPUs idle: a probe is the trainer alone, with rollouts
        at hand.
        """
        return {
            **super().load_request(candidate, task),
            "server": None,
            "idle": {"gpus": server_gpus(candidate.settings)},
        }

    def probe_request(
        self, candidate: Candidate, task: Task, plan: ProbePlan
    ) -> Mapping[str, object]:
        return {
            **super().probe_request(candidate, task, plan),
            "dataset": None,
            "reward_funcs": None,
        }

    def trace_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        """Return the specification of a trace: each micro-batch is the fullest row, by its
        number of rollouts.
        """
        settings = candidate.settings
        row = fullest_row(settings, ranks_of(settings, task.hardware.count))
        request = requests.trace_request(
            candidate, task, count_of(settings, "max_prompt_length"), row.completion
        )
        whole = cast("Mapping[str, object]", request["settings"])
        step = {name: value for name, value in whole.items() if name not in NOT_IN_STEP}
        counted = {**step, "per_device_train_batch_size": row.rollouts, "token_budget": 0}
        return {
            **request,
            "settings": counted,
            **({"groups": row.groups} if row.groups > 1 else {}),
        }

    def compose(self, candidate: Candidate, task: Task) -> Composition:
        """Return the policy alone, beside a server that is never waited for while rollouts are
        ahead.

        The completions of a step have the length of the traced ones, with which a row is full.
        """
        settings, ranks = candidate.settings, ranks_of(candidate.settings, task.hardware.count)
        each, by_tokens = completions_each_step(settings, ranks), bool(token_budget(settings))
        batch = each * ranks * (count_of(settings, ACCUMULATION) or 1)
        return replace(
            requests.compose(candidate, task),
            micro_batch=each,
            generation_batch=batch,
            completion_length=fullest_row(settings, ranks).completion,
            split=_split(settings, task, batch),
            attention=None,
            packs_rows=True,
            token_budget=by_tokens,
            steps_by_rows=by_tokens,
            notes=tuple(_notes(settings)),
        )


def completions_each_step(settings: Settings, ranks: int) -> int:
    """Return the completions of a rank and micro-step whose rollouts fill their row."""
    return (
        fullest_row(settings, ranks).rollouts
        if token_budget(settings)
        else count_of(settings, "per_device_train_batch_size")
    )


# Rules.


def _attention(settings: Settings, task: Task) -> Iterator[str]:
    """Yield what the trainer's only attention kernel lacks."""
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
    # 1. Builds of the kernel.
    gpu = hardware_detection.gpu_of(task.hardware)
    capability = gpu.compute_capability if gpu is not None else None
    if capability and not KERNEL_FROM <= float(capability) < KERNEL_BELOW:
        yield (
            "AsyncGRPOTrainer's attention is kernels-community/flash-attn3, which is built for"
            f" compute capability 8 and 9; {task.hardware.name} has {capability}. Use --method grpo"
            " with vllm_mode=server."
        )
    if not (
        settings.get("dtype") in ("bfloat16", "float16")
        or settings.get("bf16")
        or settings.get("fp16")
    ):
        yield (
            "AsyncGRPOTrainer's attention kernel computes in bfloat16 or float16 only: bf16 must"
            " be on."
        )
    # 2. The model's layers.
    text = _text(task)
    hidden, heads = count_of(text, "hidden_size"), count_of(text, "num_attention_heads")
    size = count_of(text, "head_dim") or (hidden // heads if heads else 0)
    if size > LARGEST_HEAD or size % 8:
        yield (
            f"AsyncGRPOTrainer's attention kernel takes heads of at most {LARGEST_HEAD}, a multiple"
            f" of 8, and not of {size}."
        )
    if count_of(text, "kv_lora_rank"):
        yield (
            "AsyncGRPOTrainer's attention kernel has no backward pass for keys and values of"
            " different sizes (MLA)."
        )
    named = text.get("layer_types")
    types = set(named) if isinstance(named, list | tuple) else set()
    if types - ATTENTION_LAYERS or any(text.get(name) for name in RECURRENT_SIZES):
        yield (
            "AsyncGRPOTrainer refuses recurrent layers: a row holds several rollouts, and they"
            " would see each other."
        )
    if text.get("model_type") == "gpt_oss":
        yield "AsyncGRPOTrainer refuses attention sinks, which its kernel lacks."


def _training(settings: Settings, task: Task) -> Iterator[str]:
    kind = sharding_of(settings, ranks_of(settings, task.hardware.count))
    if kind not in SENT_SHARDINGS:
        yield (
            f"AsyncGRPOTrainer sends weights of ddp and fsdp2 only, and sharding is {kind}. Use"
            " sharding=fsdp2."
        )
    if kind == "fsdp2" and ranks_of(settings, task.hardware.count) == 1:
        yield (
            "sharding=fsdp2 divides the model over the GPUs that train, and there is one. Use"
            " sharding=ddp."
        )
    if settings.get("use_liger_kernel"):
        yield "AsyncGRPOTrainer refuses use_liger_kernel: its own head keeps no logits either."
    if (
        settings.get("load_in_4bit")
        or settings.get("load_in_8bit")
        or combinations.quantisation(task)
    ):
        yield (
            "quantised weights are not modelled with AsyncGRPOTrainer, which sends whole weights."
            " Use --tuning lora."
        )
    targets = settings.get("lora_target_modules") or task.workload.user_settings.get(
        "lora_target_modules"
    )
    if "lm_head" in str(targets):
        yield (
            "AsyncGRPOTrainer refuses an adapter on lm_head, whose base weight it reads. Leave it"
            " out of lora_target_modules."
        )
    if settings.get("fp16") and settings.get("bf16"):
        yield "fp16 and bf16 cannot both be on."
    if settings.get("optim") not in fields(ASYNC_GRPO)["optim"].choices:
        yield (
            f"optim must be one of {', '.join(fields(ASYNC_GRPO)['optim'].choices)}, and is"
            f" {settings.get('optim')!r}."
        )


def _batch(settings: Settings, task: Task) -> Iterator[str]:
    # 1. Counts, and the row that rollouts must fit into.
    budget, longest = token_budget(settings), window(settings)
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
    positions = count_of(_text(task), "max_position_embeddings")
    if positions and longest > positions and not _text(task).get("rope_scaling"):
        yield (
            f"longest prompt plus longest completion ({longest} tokens) exceed the model's"
            f" {positions} positions."
        )
    # 2. The global batch.
    ranks, steps = (
        ranks_of(settings, task.hardware.count),
        count_of(settings, "gradient_accumulation_steps"),
    )
    if ranks < 1:
        return  # said by the rules of the server
    each = completions_each_step(settings, ranks)
    of = f"{each} completions in a full row" if budget else f"per_device_train_batch_size {each}"
    product = f"{of} x {ranks} ranks x gradient_accumulation_steps {steps}"
    yield from other_global_batch(task, product, each * ranks * steps)


def _text(task: Task) -> Mapping[str, object]:
    config = task.workload.model.config
    named = config.get("text_config")
    return {**config, **named} if isinstance(named, Mapping) else config


# Composition.


def _split(settings: Settings, task: Task, batch: int) -> SplitEngines:
    """Return vLLM's server. It pauses for new weights, and goes on with what it has begun.

    Rollouts wait in the queue, at most until they are too stale to be used."""
    ranks, staleness = ranks_of(settings, task.hardware.count), count_of(settings, "max_staleness")
    generating = count_of(settings, "max_inflight_tasks")
    if generating < 0:  # TRL's default
        micro, steps = (
            count_of(settings, name)
            for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
        )
        generating = max(1, staleness) * micro * steps * ranks
    queue = count_of(
        {"queue_maxsize": trl_settings.default("queue_maxsize", ASYNC_GRPO), **settings},
        "queue_maxsize",
    )
    return served(
        task.hardware,
        gpus=server_gpus(settings),
        tensor_parallel=server_parallel(settings),
        window=window(settings),
        dtype=trl_settings.engine_dtype(task.workload.model.config),
        utilization=SHARE,
        overlap="stream",
        at_sync="pause",
        batches_ahead=min(
            float(staleness * max(1, count_of(settings, "weight_sync_steps"))),
            (generating + queue) / batch,
        ),
        in_flight=max(1, generating),
    )


def _notes(settings: Settings) -> Iterator[str]:
    yield NEW_BUFFERS
    yield (
        "trains on rollouts of older weights, within max_staleness; a step of this trainer has"
        " never been measured by autotune"
    )
    if settings.get("use_peft"):
        yield (
            "the adapter is merged to be sent; a server with --enable-lora takes it as files, which"
            " is not modelled"
        )
    if token_budget(settings):
        yield (
            "rows are full: shorter completions make more of them in an optimizer step, not fewer"
            " micro-steps"
        )


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """Fullest row of a micro-batch."""

    rollouts: int
    groups: int  # prompts
    completion: int  # tokens of each completion


def token_budget(settings: Mapping[str, object]) -> int:
    """Return the most tokens of a row; 0: rollouts are counted. TRL's default is the server's
    window.
    """
    given = settings.get("token_budget")
    return max(0, given) if isinstance(given, int) else window(settings)


def window(settings: Mapping[str, object]) -> int:
    return count_of(settings, "max_prompt_length") + count_of(settings, "max_completion_length")


def fullest_row(settings: Mapping[str, object], ranks: int) -> PackedRow:
    """Return the row with the most tokens: of rollouts that fill a budget, else of the longest
    ones.
    """
    budget, group = token_budget(settings), max(1, count_of(settings, "num_generations"))
    prompt, longest = (
        count_of(settings, "max_prompt_length"),
        max(1, count_of(settings, "max_completion_length")),
    )
    if not budget:
        rollouts, groups = _fullest_by_count(
            count_of(settings, "per_device_train_batch_size"), max(1, ranks), group
        )
        return PackedRow(rollouts=rollouts, groups=groups, completion=longest)
    rollouts = 1
    while _tokens(rollouts, group, prompt, longest) < budget:
        rollouts += 1
    completion = (budget - _tokens(rollouts, group, prompt, 0)) // rollouts
    if completion < 1 < rollouts:  # another prompt does not fit
        rollouts, completion = rollouts - 1, longest
    return PackedRow(
        rollouts=rollouts,
        groups=math.ceil(rollouts / group),
        completion=max(1, min(longest, completion)),
    )


def _tokens(rollouts: int, group: int, prompt: int, completion: int) -> int:
    groups = math.ceil(rollouts / group)
    return groups * prompt + rollouts * completion + rollouts - groups


def _fullest_by_count(each: int, ranks: int, group: int) -> tuple[int, int]:
    """Return rollouts and prompts of the fullest row: micro-batches of `each` x ranks, whole groups
    to a rank.

    Groups arrive one after the other, so that a micro-batch begins anywhere in one. The largest
    is halved while there are fewer than ranks; the largest goes first, to the emptiest rank.
    """
    count, fullest = max(1, each * ranks), (1, 1)
    for start in sorted({at * count % group for at in range(group)}):
        first = min(count, group - start)
        sizes = [first, *[group] * ((count - first) // group)]
        sizes += [rest] if (rest := count - sum(sizes)) else []
        while len(sizes) < ranks:
            largest = sizes.pop(sizes.index(max(sizes)))
            sizes += [largest // 2, largest - largest // 2]
        rows = [(0, 0)] * ranks
        for size in sorted(sizes, reverse=True):
            emptiest = rows.index(min(rows))
            rows[emptiest] = (rows[emptiest][0] + size, rows[emptiest][1] + 1)
        fullest = max(fullest, *rows)
    return fullest

"""Knobs to settings: TRL's settings with every default and derived value filled in, and the run's
distribution over GPUs.

Settings that are not TRL's: `max_prompt_length`, which autotune enforces by filtering the dataset,
and those of the launcher and of the environment. The names of these are accelerate's
(`offload_optimizer_device`, `offload_param_device`, `fsdp_offload_params`), torch's
(`PYTORCH_CUDA_ALLOC_CONF`), or autotune's own (`sharding`, `server_gpus`,
`server_tensor_parallel_size`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache

import msgspec

from autotune.core.job import Task, Workload
from autotune.core.space import Knobs, KnobValue
from autotune.core.yaml_document import packaged_table
from autotune.frameworks.base import Settings, count_of
from autotune.frameworks.stand_in_step import SHARE
from autotune.frameworks.trl.field_list import fields

DEEPSPEED: Mapping[str, int] = {
    "zero1": 1,
    "zero2": 2,
    "zero3": 3,
}  # value of `sharding` -> ZeRO stage
FSDP_VERSIONS: Mapping[str, int] = {"fsdp1": 1, "fsdp2": 2}
SHARDINGS = ("none", "ddp", *DEEPSPEED, *FSDP_VERSIONS)

OFFLOADS = ("offload_optimizer_device", "offload_param_device")
OFFLOAD_DEVICES = ("none", "cpu")
ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
NEWER_ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
"""Newer name of the same variable: torch from 2.10 on prefers it, vLLM reads the older one only."""

ENVIRONMENT_VARIABLES = (
    ALLOCATOR_VARIABLE,
)  # knobs that are environment variables, set before CUDA initialises
NESTED = (
    "gradient_checkpointing_kwargs.use_reentrant",
)  # keys inside a mapping of TRL's, in dotted form
SERVER = ("server_gpus", "server_tensor_parallel_size")
LAUNCH = (
    "sharding",
    *SERVER,
    *OFFLOADS,
    "fsdp_offload_params",
    *ENVIRONMENT_VARIABLES,
)  # settings that are left out of TRL's own file
LAUNCH_DEFAULTS: Mapping[str, KnobValue] = {
    "sharding": "ddp",
    **dict.fromkeys(OFFLOADS, "none"),
    "fsdp_offload_params": False,
}
"""Defaults of a launch."""

OWN_SETTINGS = frozenset({"max_prompt_length", *LAUNCH, *NESTED})
DEFAULT_PROMPT_LENGTH = 512
DEFAULT_ROW_LENGTH = 1024
OFFLINE = frozenset({"sft", "dpo", "kto", "reward"})  # methods that train on given rows
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_TRAINING = (*_BATCH, "gradient_checkpointing", "optim", "fp16")
_GRPO = (
    *_BATCH,
    "num_generations",
    "max_completion_length",
    "num_iterations",
    "gradient_checkpointing",
    "optim",
    "beta",
    "loss_type",
    "use_vllm",
    "fp16",
)
_ASYNC_GRPO = (
    *_BATCH,
    "num_generations",
    "max_completion_length",
    "token_budget",
    "max_inflight_tasks",
    "max_staleness",
    "weight_sync_steps",
    "gradient_checkpointing",
    "optim",
    "fp16",
)
ALWAYS_STATED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("grpo", "rloo"), _GRPO),
    **dict.fromkeys(OFFLINE, (*_TRAINING, "max_length", "beta")),
    "online-dpo": (*_TRAINING, "max_new_tokens"),
    "async-grpo": _ASYNC_GRPO,
}
"""Method -> settings that every candidate states, also at TRL's default."""

COMPLETIONS_PER_ROW = {"online-dpo": 2}  # completions per row of a micro-batch; 1 for other methods
COMPLETION_SETTINGS = {"online-dpo": "max_new_tokens"}
"""Setting of the longest completion; `max_completion_length` for other methods."""

VLLM_SETTINGS = (
    "vllm_mode",
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_enable_sleep_mode",
)
LORA_SETTINGS = ("lora_r", "lora_alpha", "lora_dropout")
GENERATION_SHAPE = ("steps_per_generation", "generation_batch_size")

# PEFT's task of a reward model: its default wraps a model that generates, and trains no score
SCORING_TASK = "SEQ_CLS"


@cache
def default(name: str, method: str = "grpo") -> KnobValue:
    """Return TRL's default."""
    value = fields(method)[name].default
    assert value is None or isinstance(value, bool | int | float | str)
    return value


def settings_of(knobs: Knobs, task: Task, method: str = "grpo") -> dict[str, KnobValue]:
    """Return all settings of these knobs. A knob of None is derived from the others.

    The order of the settings is part of a candidate's identity: stored studies depend on it."""
    # 1. Given settings and defaults.
    completion = COMPLETION_SETTINGS.get(method)
    held = {
        completion if completion and name == "max_completion_length" else name: v
        for name, v in task.workload.held.items()
    }
    given = {**held, **{name: value for name, value in knobs.items() if value is not None}}
    known = fields(method)
    defaults = {name: default(name, method) for name in ALWAYS_STATED[method] if name in known}
    if completion:
        settings = {**defaults, "max_prompt_length": DEFAULT_PROMPT_LENGTH, **given}
    else:
        settings = {
            **given,
            **{name: value for name, value in defaults.items() if name not in given},
        }
    # 2. Batch shape.
    ranks = ranks_of({} if method in OFFLINE else given, task.hardware.count)
    if "gradient_accumulation_steps" not in given:
        rows = COMPLETIONS_PER_ROW.get(method, 1) * count_of(
            settings, "per_device_train_batch_size"
        )
        settings["gradient_accumulation_steps"] = accumulation(rows * ranks, task)
    # 3. Lengths and generation.
    if completion:
        settings["max_completion_length"] = settings[completion]
        if method == "online-dpo":
            longest = count_of(settings, "max_prompt_length") + count_of(settings, completion)
            settings = {
                **settings,
                "max_length": given.get("max_length", longest),
                "use_vllm": given.get("use_vllm", False),
            }
            settings["num_generations"] = COMPLETIONS_PER_ROW[method]
        else:
            settings["use_vllm"] = False
    elif method not in OFFLINE:
        settings = {name: value for name, value in settings.items() if name not in GENERATION_SHAPE}
        images = task.workload.images
        settings.setdefault(
            "max_prompt_length",
            DEFAULT_PROMPT_LENGTH + (0 if images is None else images.row_tokens),
        )
        settings |= _generation_shape(given, settings, ranks)
    # 4. Precision, adapter, and what depends on them.
    settings |= precision(given, task) | adapter_settings(given, task)
    if method in OFFLINE:
        settings |= {**_row(settings), "use_vllm": False}
        if settings.get("padding_free") and not settings.get("packing"):
            settings["max_length"] = None  # the trainer truncates only rows that it pads
    elif not completion:
        settings |= _engine(given, settings)
    return {name: value for name, value in settings.items() if is_read(name, settings)}


def loaded(settings: Settings, task: Task, names: Iterable[str]) -> dict[str, KnobValue]:
    """Return the model, its device and ranks, and the named settings: a change of one requires a
    new load.
    """
    launch = {name: settings[name] for name in LAUNCH if settings.get(name) is not None}
    return {
        "model": task.workload.model.name,
        "model_config": task.workload.model.fingerprint,
        "weights": task.workload.weights,
        "device": task.hardware.kind,
        "ranks": ranks_of(settings, task.hardware.count),
        **{
            name: value
            for name, value in launch.items()
            if value != LAUNCH_DEFAULTS.get(name) and value != "none"
        },
        **{name: settings[name] for name in names if name in settings},
    }


def load_of(settings: Settings, task: Task) -> dict[str, KnobValue]:
    """Return the settings whose change requires a new load.

    The engine's size depends on the generation batch: at a constant one, micro-batch and
    accumulation change on the same engine."""
    names = (
        "dtype",
        "attn_implementation",
        "load_in_4bit",
        "load_in_8bit",
        "use_peft",
        *LORA_SETTINGS,
        "use_rslora",
        "use_dora",
    )
    load = loaded(settings, task, names)
    if settings["use_vllm"]:
        load.update(
            {
                name: settings[name]
                for name in (*VLLM_SETTINGS, "vllm_max_model_length", "vllm_model_impl")
                if name in settings
            }
        )
        load["max_num_seqs"] = max_num_seqs(settings)
    return load


def max_num_seqs(settings: Settings) -> int:
    """Return the number of sequences of TRL's engine: micro-batch x tensor parallel x steps."""
    parallel = {"vllm_tensor_parallel_size": 1, **settings}
    micro, steps = (
        count_of(settings, "per_device_train_batch_size"),
        count_of(settings, "steps_per_generation"),
    )
    return micro * count_of(parallel, "vllm_tensor_parallel_size") * steps


def _row(settings: Settings) -> dict[str, KnobValue]:
    """Return the prompt and completion part of the longest row, after the trainer's truncation."""
    prompt, completion = (
        count_of(settings, "max_prompt_length"),
        count_of(settings, "max_completion_length"),
    )
    given = prompt + completion if prompt and completion else 0
    longest = count_of(settings, "max_length") or given or DEFAULT_ROW_LENGTH
    row = min(longest, given) if given else longest
    if completion and not prompt:
        prompt = row - min(completion, row - 1)
    prompt = min(prompt or row // 2, row - 1)
    return {"max_prompt_length": prompt, "max_completion_length": row - prompt}


def accumulation(per_step: int, task: Task, method: str = "grpo") -> int:
    """Return the accumulation that makes the global batch; the method's default if none does."""
    total = task.workload.global_batch
    if total and per_step and total % per_step == 0:
        return total // per_step
    return int(default("gradient_accumulation_steps", method) or 1)


def _generation_shape(given: Knobs, settings: Settings, ranks: int) -> dict[str, KnobValue]:
    """Return `steps_per_generation`. Conflicting or indivisible values are left for the legality
    check.
    """
    steps, batch = given.get("steps_per_generation"), given.get("generation_batch_size")
    if batch is None:
        return {
            "steps_per_generation": (
                settings["gradient_accumulation_steps"] if steps is None else steps
            )
        }
    per_step = count_of(settings, "per_device_train_batch_size") * ranks
    if steps is not None:
        return {"generation_batch_size": batch, "steps_per_generation": steps}
    if not per_step or not isinstance(batch, int) or batch % per_step:
        return {"generation_batch_size": batch}
    return {"steps_per_generation": batch // per_step}


def precision(given: Knobs, task: Task) -> dict[str, KnobValue]:
    """Return TRL's mixed precision on a GPU, and float32 on a CPU, unless given otherwise."""
    on_cpu = task.hardware.kind == "cpu"
    bf16 = given.get("bf16")
    unset: KnobValue = "float32" if on_cpu else "bfloat16"
    return {
        "use_cpu": given.get("use_cpu", on_cpu),
        "bf16": bf16 if bf16 is not None else not on_cpu and not given.get("fp16", False),
        "dtype": (
            loaded_dtype(given["dtype"], task.workload.model.config) if "dtype" in given else unset
        ),
    }


def adapter_settings(given: Knobs, task: Task) -> dict[str, KnobValue]:
    tuning = task.workload.tuning
    use_peft = given.get("use_peft", tuning != "full")
    quantised: dict[str, KnobValue] = (
        {"load_in_4bit": given.get("load_in_4bit", True)} if tuning == "qlora" else {}
    )
    if not use_peft:
        return {"use_peft": use_peft, **quantised}
    assumed = assumed_adapter(task.workload)
    adapter = {**{name: default(name) for name in LORA_SETTINGS}, **assumed}
    return {
        "use_peft": use_peft,
        **{name: given.get(name, value) for name, value in adapter.items()},
        **quantised,
    }


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model_types: frozenset[str]


def assumed_adapter(workload: Workload) -> dict[str, KnobValue]:
    """Return the adapter settings that must be written out; none if script, user's file or PEFT
    names the layers.
    """
    stated = {**workload.held, **workload.user_settings}
    config = workload.model.config
    if workload.script is not None:
        return {}
    assumed: dict[str, KnobValue] = (
        {"lora_task_type": SCORING_TASK} if workload.method == "reward" else {}
    )
    if stated.get("lora_target_modules") or stated.get("lora_target_parameters"):
        return assumed
    if config.get("model_type") in _types_known_to_peft():
        return assumed
    # PEFT's name of all linear layers except the output projection. Experts are stacked parameters,
    # which it adapts without dropout only.
    experts = any(
        config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    return {
        **assumed,
        "lora_target_modules": "all-linear",
        **({"lora_dropout": 0.0} if experts else {}),
    }


@cache
def _types_known_to_peft() -> frozenset[str]:
    return packaged_table("autotune.frameworks.trl", "adapter_targets.yaml", _Table).model_types


def _engine(given: Knobs, settings: Settings) -> dict[str, KnobValue]:
    if not settings["use_vllm"]:
        return {}
    window = given.get("vllm_max_model_length")
    if window is None:
        window = count_of(settings, "max_prompt_length") + count_of(
            settings, "max_completion_length"
        )
    served: dict[str, KnobValue] = {}
    if with_server({**given, "use_vllm": True}):
        served = {"server_gpus": 1, **{name: given[name] for name in SERVER if name in given}}
    share = {"vllm_gpu_memory_utilization": SHARE} if served else {}
    named = {name: given.get(name, share.get(name, default(name))) for name in VLLM_SETTINGS}
    return {**named, **served, "vllm_max_model_length": window}


TORCH_DTYPES = ("bfloat16", "float16", "float32")
BY_CHECKPOINT = (
    None,
    "auto",
)  # values of `dtype` under which transformers loads the precision of the checkpoint


def checkpoint_dtype(config: Mapping[str, object]) -> str:
    """Return the precision that config.json names; transformers' own default is float32."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        named = str(part.get("dtype") or part.get("torch_dtype") or "").removeprefix("torch.")
        if named in TORCH_DTYPES:
            return named
    return "float32"


def loaded_dtype(dtype: object, config: Mapping[str, object]) -> str:
    """Return the precision in which the trainer loads the weights."""
    return checkpoint_dtype(config) if dtype in BY_CHECKPOINT else str(dtype).removeprefix("torch.")


def engine_dtype(config: Mapping[str, object]) -> str:
    """Return the precision of vLLM's weights, which TRL leaves to vLLM: half precision always."""
    named = checkpoint_dtype(config)
    return "bfloat16" if named == "float32" else named


def sharding_of(settings: Mapping[str, object], ranks: int) -> str:
    """Return the named sharding; the default is DDP on several ranks."""
    named = settings.get("sharding")
    if isinstance(named, str) and named not in ("none", "ddp"):
        return named
    return "ddp" if ranks > 1 else "none"


def with_server(settings: Mapping[str, object]) -> bool:
    return bool(settings.get("use_vllm")) and settings.get("vllm_mode") == "server"


def server_gpus(settings: Mapping[str, object]) -> int:
    """Return the number of GPUs of vLLM's server: default 1, and 0 without a server."""
    return count_of({"server_gpus": 1, **settings}, "server_gpus") if with_server(settings) else 0


def server_parallel(settings: Mapping[str, object]) -> int:
    """Return the GPUs that split each layer of the server; by default all of its GPUs."""
    return count_of(settings, "server_tensor_parallel_size") or server_gpus(settings)


def ranks_of(settings: Mapping[str, object], gpus: int) -> int:
    """Return the number of training processes: one per GPU, without those of the server."""
    return gpus - server_gpus(settings)


_CONDITIONS: Mapping[str, Callable[[Mapping[str, object]], bool]] = {
    **dict.fromkeys(SERVER, with_server),
    "offload_optimizer_device": lambda settings: settings.get("sharding") in DEEPSPEED,
    "offload_param_device": lambda settings: settings.get("sharding") == "zero3",
    "fsdp_offload_params": lambda settings: settings.get("sharding") in FSDP_VERSIONS,
    "ds3_gather_for_generation": lambda settings: settings.get("sharding") == "zero3",
    "vllm_tensor_parallel_size": lambda settings: not with_server(settings),
    "gradient_checkpointing_kwargs.use_reentrant": lambda settings: bool(
        settings.get("gradient_checkpointing")
    ),
}
"""Setting -> condition under which it has an effect."""


def is_read(name: str, settings: Settings) -> bool:
    """Return False for a setting without effect: it would separate equal candidates."""
    if (name.startswith("vllm_") and not settings["use_vllm"]) or (
        name in _CONDITIONS and not _CONDITIONS[name](settings)
    ):
        return False
    return not (name.startswith("lora_") and not settings["use_peft"])


def nested(settings: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Return TRL's mappings with the dotted settings merged into the given values."""
    made: dict[str, object] = {}
    for name in NESTED:
        if settings.get(name) is not None:
            outer, _, inner = name.partition(".")
            before = made.get(outer, given.get(outer))
            made[outer] = {**(before if isinstance(before, Mapping) else {}), inner: settings[name]}
    return made


def environment_of(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the environment variables of a run."""
    return {name: str(settings[name]) for name in ENVIRONMENT_VARIABLES if settings.get(name)}

"""A trainer's settings: the framework's configuration from a request's flat ones, named as in `trl
grpo --config`, and what the trainer made of them, with the bytes of its models.

Settings that would write outside the probe's scratch folder, or change the extent of the loop, are
overridden here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..model_memory import ModelBytes, sum_up
from ..protocol import Arguments, Request, Settings

# No output folder, no hub, no tracker.
NO_SIDE_EFFECTS: Settings = {
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "push_to_hub": False,
    "hub_model_id": None,
    "log_completions_hub_repo": None,
    "trackio_space_id": None,
    "log_completions": False,
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
    "do_eval": False,
}
PROBE_OVERRIDES: Settings = {
    # Such steps cost as much as any other, and leave the weights unchanged for the next candidate.
    "learning_rate": 0.0,
    "weight_decay": 0.0,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    # Completions of a forced length are truncated: no token would be left in the loss.
    "mask_truncated_completions": False,
    "model_init_kwargs": None,  # the trainer gets a model object
    "auto_find_batch_size": False,
}

# Settings that the load has applied already.
FIXED_BY_LOAD = frozenset({"dtype", "model_name_or_path", "model_revision", "trust_remote_code"})

# Settings that the trainer's own, completed arguments have.
COMPLETED = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "bf16",
    "fp16",
    "tf32",
    "max_grad_norm",
    "torch_empty_cache_steps",
    "vllm_mode",
)
# Settings that the trainer copies to its attributes.
ATTRIBUTES = (
    "num_generations",
    "max_completion_length",
    "num_iterations",
    "loss_type",
    "use_vllm",
    "beta",
    "temperature",
)
# Roles, and the trainer's attribute for each.
OTHER_MODELS = (("critic", "value_model"), ("reference", "ref_model"), ("reward", "reward_model"))


@dataclass(frozen=True, kw_only=True)
class ForcedLengths:
    """Lengths forced on one run of the loop."""

    prompt: int | None  # tokens of the longest prompt; None leaves prompts unchanged
    completion: int  # tokens of each completion
    pad_prompts: bool  # true: each prompt gets exactly `prompt` tokens. False: longer ones are cut
    # lengths of which each completion gets one; empty: all have `completion`
    drawn: tuple[int, ...] = ()
    drawn_prompts: tuple[int, ...] = ()  # the same for prompts; empty: as `pad_prompts` says
    varied: bool = False  # completions of several lengths up to `completion`, see `rollouts`


# The framework's configuration from a request.


def split(
    settings: Settings,
    config_class: Any,
    model_config_class: Any,
) -> tuple[Arguments, Arguments]:
    """Split settings into training and model arguments. A name of neither is an error."""
    training_names = {field.name for field in fields(config_class)}
    model_names = {field.name for field in fields(model_config_class)}
    unknown = sorted(set(settings) - training_names - model_names)
    if unknown:
        raise TypeError(
            f"{config_class.__name__} and {model_config_class.__name__} have no setting"
            f" {', '.join(unknown)}"
        )
    load_names = model_names - FIXED_BY_LOAD
    return _only(settings, training_names), _only(settings, load_names)


def arguments_of(
    config_class: Any,
    settings: Settings,
    *,
    lengths: ForcedLengths,
    device: str,
    max_steps: int,
    seed: int,
    folder: Path,
) -> Arguments:
    """Arguments of the framework's config: the candidate's settings, lengths, overrides."""
    arguments = {**settings, **NO_SIDE_EFFECTS, **PROBE_OVERRIDES}
    arguments |= {
        "output_dir": str(folder),
        "max_steps": max_steps,
        "seed": seed,
        "use_cpu": device == "cpu",
    }
    if device == "cpu":
        arguments.setdefault("bf16", False)  # the default requires a GPU
    if arguments.get("use_vllm"):
        arguments.setdefault("vllm_mode", "colocate")
    arguments["generation_kwargs"] = {
        **(settings.get("generation_kwargs") or {}),
        **_generation_lengths(lengths, use_vllm=bool(arguments.get("use_vllm"))),
    }
    return _only(arguments, known_fields(config_class))


def _generation_lengths(lengths: ForcedLengths, *, use_vllm: bool) -> Arguments:
    """Return the generation's arguments that force the length of completions."""
    tokens = lengths.completion
    if use_vllm:
        return {"ignore_eos": True, "min_tokens": tokens, "max_tokens": tokens}
    if lengths.drawn or lengths.varied:  # rows end by themselves, see `rollouts`
        return {"max_new_tokens": tokens}
    return {"min_new_tokens": tokens, "max_new_tokens": tokens}


def model_arguments(
    settings: Settings,
    load: Request,
    model_config_class: Any,
) -> Arguments:
    """Adapter and attention kernel: those of the candidate, else those of the load."""
    arguments: Arguments = {}
    if load.get("adapter"):
        arguments = {"use_peft": True, **load["adapter"]}
    arguments["attn_implementation"] = load["model"].get("attn_implementation")
    all_arguments = {**arguments, **settings}
    return _only(all_arguments, known_fields(model_config_class))


def known_fields(config_class: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(config_class) if field.init)


def _only(settings: Settings, names: Collection[str]) -> Arguments:
    return {name: value for name, value in settings.items() if name in names}


# What the trainer made of it.


def effective_settings(
    trainer: Any,
    counts: Any,
    engines: Any,
) -> Arguments:
    """Read the settings from trainer, model and engine, under the framework's names."""
    settings = {
        **_trainer_settings(trainer),
        **_model_settings(trainer),
        "longest_prompt_seen": counts.longest_prompt,
        "longest_completion_seen": counts.longest_completion,
        "world_size": trainer.accelerator.num_processes,
        "distributed_type": _plain(trainer.accelerator.distributed_type),
        "device": str(trainer.accelerator.device),
    }
    has_engine = settings.get("use_vllm") and settings.get("vllm_mode") != "server"
    if has_engine and engines is not None:
        config = trainer.vllm_generation.llm.llm_engine.vllm_config
        settings |= _engine_settings(config, engines.arguments)
    return settings


def _trainer_settings(trainer: Any) -> Arguments:
    settings = {}
    for name in COMPLETED:
        if hasattr(trainer.args, name):
            settings[name] = getattr(trainer.args, name)
    for name in ATTRIBUTES:
        if hasattr(trainer, name):
            settings[name] = getattr(trainer, name)
    settings["optim"] = _plain(trainer.args.optim)
    # accelerate wraps the optimizer.
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    settings["optimizer_class"] = type(optimizer).__name__
    settings["optimizer_state_dtype"] = _state_dtype(optimizer)
    return settings


def _state_dtype(optimizer: Any) -> str | None:
    """Return the precision of the optimizer's state, of its first tensor that is no counter."""
    states = getattr(optimizer, "state", {})
    for state in states.values():
        for value in state.values():
            if hasattr(value, "dtype") and value.dim():
                return _dtype_name(value)
    return None


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _model_settings(trainer: Any) -> Arguments:
    model = trainer.accelerator.unwrap_model(trainer.model)
    has_adapter = hasattr(model, "peft_config")
    base = model.get_base_model() if has_adapter else model
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    first = next(base.parameters())
    wrapped = getattr(trainer, "model_wrapped", trainer.model)
    settings: Arguments = {
        "dtype": _dtype_name(first),
        "gradient_checkpointing": bool(getattr(base, "is_gradient_checkpointing", False)),
        "attn_implementation": getattr(base.config, "_attn_implementation", None),
        "parameters": sum(map(_numel, parameters)),
        "parameters_on_this_rank": sum(map(local_numel, parameters)),
        "trainable_parameters": sum(map(_numel, trainable)),
        "wrapper": type(wrapped).__name__,
        "use_peft": has_adapter,
    }
    if trainable:
        settings["trained_dtype"] = _dtype_name(trainable[0])
    if has_adapter:
        adapter = next(iter(model.peft_config.values()))
        settings |= {
            "lora_r": getattr(adapter, "r", None),
            "lora_alpha": getattr(adapter, "lora_alpha", None),
            "lora_target_modules": _plain(getattr(adapter, "target_modules", None)),
        }
    return settings


def _engine_settings(config: Any, arguments: Mapping[str, Any]) -> Arguments:
    """Return the settings of vLLM: its own configuration, and the arguments that it was given."""
    cache = config.cache_config
    block_count = cache.num_gpu_blocks or 0
    cache_tokens = block_count * (cache.block_size or 0)
    return {
        # The share of the limit, as requested, and the share of the device that vLLM was given.
        "vllm_gpu_memory_utilization": arguments.get("gpu_memory_utilization"),
        "engine_share_of_device": cache.gpu_memory_utilization,
        "vllm_max_model_length": config.model_config.max_model_len,
        "vllm_tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "vllm_enable_sleep_mode": bool(arguments.get("enable_sleep_mode")),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "kv_cache_tokens": cache_tokens or None,
        "enforce_eager": config.model_config.enforce_eager,
    }


def _numel(parameter: Any) -> int:
    """Elements of the whole parameter, also of one that DeepSpeed partitioned."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def local_numel(parameter: Any) -> int:
    """Elements on this rank. Small parameters stay whole under ZeRO-3."""
    if hasattr(parameter, "ds_tensor"):
        return int(parameter.ds_numel if parameter.ds_persist else parameter.ds_tensor.numel())
    if hasattr(parameter, "to_local"):
        parameter = parameter.to_local()
    return int(parameter.numel())


def _plain(value: Any) -> Any:
    """Convert to JSON types."""
    if isinstance(value, list | tuple | set | frozenset):
        return sorted(str(item) for item in value)
    return getattr(value, "value", value)


def model_bytes(trainer: Any) -> dict[str, int]:
    """Bytes of the trainer's models on this rank, by part: see `model_memory`."""
    candidates = [(role, getattr(trainer, name, None)) for role, name in OTHER_MODELS]
    for reward in getattr(trainer, "reward_funcs", None) or ():
        candidates.append(("reward", reward))
    models = []
    optimizer = trainer.optimizer
    for role, model in candidates:
        if hasattr(model, "parameters"):  # neither missing nor a function
            model = trainer.accelerator.unwrap_model(model)
            models.append(ModelBytes(role, model, optimizer))
    # Last: tensors that it shares count for the others.
    policy = trainer.accelerator.unwrap_model(trainer.model)
    models.append(ModelBytes("", policy, optimizer))
    return sum_up(models, trainer.accelerator.device.type)

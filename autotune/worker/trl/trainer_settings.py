"""A trainer's settings: the framework's configuration from a request's flat ones, named as in `trl
grpo --config`, and what the trainer made of them, with the bytes of its models.

Settings that would write outside the probe's scratch folder, or change the extent of the loop, are
overridden here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..model_memory import ModelBytes, sum_up

# No output folder, no hub, no tracker.
NO_SIDE_EFFECTS: Mapping[str, Any] = {
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
PROBE_OVERRIDES: Mapping[str, Any] = {
    "learning_rate": (
        0.0
        # such steps cost as much as any other, and leave the weights unchanged for the next candidate
    ),
    "weight_decay": 0.0,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "mask_truncated_completions": (
        False
    ),  # completions of a forced length are truncated: no token would be left in the loss
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForcedLengths:
    """Lengths forced on one run of the loop."""

    prompt: int | None  # tokens of the longest prompt; None leaves prompts unchanged
    completion: int  # tokens of each completion
    pad_prompts: bool  # true: each prompt gets exactly `prompt` tokens. False: longer ones are cut
    drawn: tuple[
        int, ...
    ] = ()  # lengths of which each completion gets one; empty: all have `completion`
    drawn_prompts: tuple[int, ...] = ()  # the same for prompts; empty: as `pad_prompts` says


def split(
    settings: Mapping[str, Any], config_class: Any, model_config_class: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split settings into training and model arguments. A name of neither is an error."""
    training_names = {field.name for field in dataclasses.fields(config_class)}
    model_names = {field.name for field in dataclasses.fields(model_config_class)}
    unknown = sorted(set(settings) - training_names - model_names)
    if unknown:
        raise TypeError(
            f"{config_class.__name__} and {model_config_class.__name__} have no setting"
            f" {', '.join(unknown)}"
        )
    training = {name: value for name, value in settings.items() if name in training_names}
    model = {name: value for name, value in settings.items() if name in model_names - FIXED_BY_LOAD}
    return training, model


def arguments_of(
    config_class: Any,
    settings: Mapping[str, Any],
    *,
    lengths: ForcedLengths,
    device: str,
    max_steps: int,
    seed: int,
    folder: Path,
) -> dict[str, Any]:
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
    count = lengths.completion
    if arguments.get("use_vllm"):
        arguments.setdefault("vllm_mode", "colocate")
        forced = {"ignore_eos": True, "min_tokens": count, "max_tokens": count}
    elif lengths.drawn:  # rows end by themselves, see `rollouts`
        forced = {"max_new_tokens": count}
    else:
        forced = {"min_new_tokens": count, "max_new_tokens": count}
    arguments["generation_kwargs"] = {**(settings.get("generation_kwargs") or {}), **forced}
    return {name: value for name, value in arguments.items() if name in known_fields(config_class)}


def model_arguments(
    settings: Mapping[str, Any], load: Mapping[str, Any], model_config_class: Any
) -> dict[str, Any]:
    """Adapter and attention kernel: those of the candidate, else those of the load."""
    adapter = load.get("adapter")
    arguments = {"use_peft": True, **adapter} if adapter else {}
    arguments["attn_implementation"] = load["model"].get("attn_implementation")
    return {
        name: value
        for name, value in {**arguments, **settings}.items()
        if name in known_fields(model_config_class)
    }


def known_fields(config_class: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(config_class) if field.init)


def effective_settings(trainer: Any, seen: Any, engines: Any) -> dict[str, Any]:
    """Read the settings from trainer, model and engine, under the framework's names."""
    # 1. Trainer.
    found = {name: getattr(trainer.args, name) for name in COMPLETED if hasattr(trainer.args, name)}
    found |= {name: getattr(trainer, name) for name in ATTRIBUTES if hasattr(trainer, name)}
    found["optim"] = _plain(trainer.args.optim)
    found["optimizer_class"] = type(
        getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    ).__name__
    # 2. Model.
    model = policy_of(trainer)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    parameters = list(model.parameters())
    found |= {
        "dtype": str(next(base.parameters()).dtype).removeprefix("torch."),
        "gradient_checkpointing": bool(getattr(base, "is_gradient_checkpointing", False)),
        "attn_implementation": getattr(base.config, "_attn_implementation", None),
        "parameters": sum(_numel(parameter) for parameter in parameters),
        "parameters_on_this_rank": sum(local_numel(parameter) for parameter in parameters),
        "trainable_parameters": sum(
            _numel(parameter) for parameter in parameters if parameter.requires_grad
        ),
        "wrapper": type(getattr(trainer, "model_wrapped", trainer.model)).__name__,
        "use_peft": hasattr(model, "peft_config"),
    }
    if found["use_peft"]:
        adapter = next(iter(model.peft_config.values()))
        found |= {
            "lora_r": getattr(adapter, "r", None),
            "lora_alpha": getattr(adapter, "lora_alpha", None),
        }
        found["lora_target_modules"] = _plain(getattr(adapter, "target_modules", None))
    # 3. Run and engine.
    found |= {
        "longest_prompt_seen": seen.longest_prompt,
        "longest_completion_seen": seen.longest_completion,
    }
    found |= {
        "world_size": trainer.accelerator.num_processes,
        "distributed_type": _plain(trainer.accelerator.distributed_type),
    }
    found["device"] = str(trainer.accelerator.device)
    if found.get("use_vllm") and engines is not None and found.get("vllm_mode") != "server":
        config = trainer.vllm_generation.llm.llm_engine.vllm_config
        found |= {
            # The share of the limit, as it was requested, and that of the whole device.
            "vllm_gpu_memory_utilization": engines.arguments.get("gpu_memory_utilization"),
            "engine_share_of_device": config.cache_config.gpu_memory_utilization,
            "vllm_max_model_length": config.model_config.max_model_len,
            "vllm_tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "vllm_enable_sleep_mode": bool(engines.arguments.get("enable_sleep_mode")),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "kv_cache_tokens": (
                (config.cache_config.num_gpu_blocks or 0) * (config.cache_config.block_size or 0)
                or None
            ),
            "enforce_eager": config.model_config.enforce_eager,
        }
    return found


def _numel(parameter: Any) -> int:
    """Elements of the whole parameter, also of one that DeepSpeed partitioned."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def local_numel(parameter: Any) -> int:
    """Elements on this rank. Small parameters stay whole under ZeRO-3."""
    if hasattr(parameter, "ds_tensor"):
        return int(parameter.ds_numel if parameter.ds_persist else parameter.ds_tensor.numel())
    return int(
        parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel()
    )


def _plain(value: Any) -> Any:
    """Convert to JSON types."""
    if isinstance(value, list | tuple | set | frozenset):
        return sorted(str(item) for item in value)
    return getattr(value, "value", value)


def model_bytes(trainer: Any) -> dict[str, int]:
    """Bytes of the trainer's models on this rank, by part: see `model_memory`."""
    unwrap, optimizer = trainer.accelerator.unwrap_model, trainer.optimizer
    others = [(role, getattr(trainer, name, None)) for role, name in OTHER_MODELS]
    others += [("reward", reward) for reward in getattr(trainer, "reward_funcs", None) or ()]
    models = [
        ModelBytes(role=role, model=unwrap(one), optimizer=optimizer)
        for role, one in others
        if hasattr(one, "parameters")
    ]
    models.append(
        ModelBytes(role="", model=policy_of(trainer), optimizer=optimizer)
    )  # last: shared tensors count for the others
    return sum_up(models, trainer.accelerator.device.type)


def policy_of(trainer: Any) -> Any:
    """Return the trained model. PPO's trainer has it in one module with its critic."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return getattr(model, "policy", model)

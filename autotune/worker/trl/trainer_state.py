"""Facts read back from a trainer: effective settings, and bytes of its models."""

from __future__ import annotations

from typing import Any

from ..model_memory import ModelBytes, sum_up

# Settings that the trainer's own, completed arguments have.
ARGUMENTS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "bf16",
    "fp16", "tf32", "max_grad_norm", "torch_empty_cache_steps", "vllm_mode",
)  # fmt: skip
# Settings that the trainer copies to its attributes.
ATTRIBUTES = ("num_generations", "max_completion_length", "num_iterations", "loss_type", "use_vllm", "beta", "temperature")
# Roles, and the trainer's attribute for each.
OTHER_MODELS = (("critic", "value_model"), ("reference", "ref_model"), ("reward", "reward_model"))


def effective_settings(trainer: Any, seen: Any, engines: Any) -> dict[str, Any]:
    """Read the settings from trainer, model and engine, under the framework's names."""
    # 1. Trainer.
    found = {name: getattr(trainer.args, name) for name in ARGUMENTS if hasattr(trainer.args, name)}
    found |= {name: getattr(trainer, name) for name in ATTRIBUTES if hasattr(trainer, name)}
    found["optim"] = _plain(trainer.args.optim)
    found["optimizer_class"] = type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__
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
        "trainable_parameters": sum(_numel(parameter) for parameter in parameters if parameter.requires_grad),
        "wrapper": type(getattr(trainer, "model_wrapped", trainer.model)).__name__,
        "use_peft": hasattr(model, "peft_config"),
    }
    if found["use_peft"]:
        adapter = next(iter(model.peft_config.values()))
        found |= {"lora_r": getattr(adapter, "r", None), "lora_alpha": getattr(adapter, "lora_alpha", None)}
        found["lora_target_modules"] = _plain(getattr(adapter, "target_modules", None))
    # 3. Run and engine.
    found |= {"longest_prompt_seen": seen.longest_prompt, "longest_completion_seen": seen.longest_completion}
    found |= {"world_size": trainer.accelerator.num_processes, "distributed_type": _plain(trainer.accelerator.distributed_type)}
    found["device"] = str(trainer.accelerator.device)
    if found.get("use_vllm") and engines is not None and found.get("vllm_mode") != "server":
        config = trainer.vllm_generation.llm.llm_engine.vllm_config
        found |= {
            # The value of the output files, for the requested card, and the share of the device that emulates it.
            "vllm_gpu_memory_utilization": engines.arguments.get("gpu_memory_utilization"),
            "engine_share_of_device": config.cache_config.gpu_memory_utilization,
            "vllm_max_model_length": config.model_config.max_model_len,
            "vllm_tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "vllm_enable_sleep_mode": bool(engines.arguments.get("enable_sleep_mode")),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "kv_cache_tokens": (config.cache_config.num_gpu_blocks or 0) * (config.cache_config.block_size or 0) or None,
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
    return int(parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel())


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
    models = [ModelBytes(role=role, model=unwrap(one), optimizer=optimizer) for role, one in others if hasattr(one, "parameters")]
    models.append(ModelBytes(role="", model=policy_of(trainer), optimizer=optimizer))  # last: shared tensors count for the others
    return sum_up(models, trainer.accelerator.device.type)


def policy_of(trainer: Any) -> Any:
    """Return the trained model. PPO's trainer has it in one module with its critic."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return getattr(model, "policy", model)

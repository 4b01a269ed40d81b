"""The settings as they came out: read back from the trainer, the model and the engine, never from the request."""

from __future__ import annotations

from typing import Any

ARGUMENTS = (
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
"""What only the trainer's own, completed arguments tell."""

ATTRIBUTES = ("num_generations", "max_completion_length", "num_iterations", "loss_type", "use_vllm", "beta", "temperature")
"""What the trainer took over for itself."""


def read(trainer: Any, seen: Any, engines: Any) -> dict[str, Any]:
    """A flat mapping under the framework's own names where it has one."""
    found = {name: getattr(trainer.args, name) for name in ARGUMENTS if hasattr(trainer.args, name)}
    found |= {name: getattr(trainer, name) for name in ATTRIBUTES if hasattr(trainer, name)}
    found["optim"] = _plain(trainer.args.optim)
    found["optimizer_class"] = type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__
    found |= _of_the_model(trainer)
    found |= {"longest_prompt_seen": seen.longest_prompt, "longest_completion_seen": seen.longest_completion}
    found |= {"world_size": trainer.accelerator.num_processes, "distributed_type": _plain(trainer.accelerator.distributed_type)}
    found["device"] = str(trainer.accelerator.device)
    if found.get("use_vllm") and engines is not None:
        found |= _of_the_engine(trainer, engines)
    return found


def _of_the_model(trainer: Any) -> dict[str, Any]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    parameters = list(model.parameters())
    found = {
        "dtype": str(next(base.parameters()).dtype).removeprefix("torch."),
        "gradient_checkpointing": bool(getattr(base, "is_gradient_checkpointing", False)),
        "attn_implementation": getattr(base.config, "_attn_implementation", None),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "wrapper": type(trainer.model_wrapped).__name__,
        "use_peft": hasattr(model, "peft_config"),
    }
    if found["use_peft"]:
        adapter = next(iter(model.peft_config.values()))
        found |= {"lora_r": getattr(adapter, "r", None), "lora_alpha": getattr(adapter, "lora_alpha", None)}
        found["lora_target_modules"] = _plain(getattr(adapter, "target_modules", None))
    return found


def _of_the_engine(trainer: Any, engines: Any) -> dict[str, Any]:
    engine = trainer.vllm_generation.llm.llm_engine
    config = engine.vllm_config
    return {
        "vllm_gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "vllm_max_model_length": config.model_config.max_model_len,
        "vllm_tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "vllm_enable_sleep_mode": bool(engines.arguments.get("enable_sleep_mode")),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "kv_cache_tokens": (config.cache_config.num_gpu_blocks or 0) * (config.cache_config.block_size or 0) or None,
        "enforce_eager": config.model_config.enforce_eager,
    }


def _plain(value: Any) -> Any:
    """JSON's kinds only."""
    if isinstance(value, list | tuple | set | frozenset):
        return sorted(str(item) for item in value)
    return getattr(value, "value", value)

"""The settings as they came out: read back from the trainer, the model and the engine, never from the request."""

from __future__ import annotations

from typing import Any

from . import trl_models

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
    if found.get("use_vllm") and engines is not None and found.get("vllm_mode") != "server":
        found |= _of_the_engine(trainer, engines)
    return found


def _of_the_model(trainer: Any) -> dict[str, Any]:
    model = trl_models.policy_of(trainer)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    parameters = list(model.parameters())
    found = {
        "dtype": str(next(base.parameters()).dtype).removeprefix("torch."),
        "gradient_checkpointing": bool(getattr(base, "is_gradient_checkpointing", False)),
        "attn_implementation": getattr(base.config, "_attn_implementation", None),
        "parameters": sum(_numel(parameter) for parameter in parameters),
        "parameters_on_this_rank": sum(_numel_here(parameter) for parameter in parameters),
        "trainable_parameters": sum(_numel(parameter) for parameter in parameters if parameter.requires_grad),
        "wrapper": type(getattr(trainer, "model_wrapped", trainer.model)).__name__,
        "use_peft": hasattr(model, "peft_config"),
    }
    if found["use_peft"]:
        adapter = next(iter(model.peft_config.values()))
        found |= {"lora_r": getattr(adapter, "r", None), "lora_alpha": getattr(adapter, "lora_alpha", None)}
        found["lora_target_modules"] = _plain(getattr(adapter, "target_modules", None))
    return found


def _numel(parameter: Any) -> int:
    """Of the whole, wherever its parts are: DeepSpeed keeps the count beside a parameter that it took apart."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _numel_here(parameter: Any) -> int:
    """Of the part that this rank holds; small ones stay whole under ZeRO-3."""
    if hasattr(parameter, "ds_tensor"):
        return int(parameter.ds_numel if parameter.ds_persist else parameter.ds_tensor.numel())
    return int(parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel())


def _of_the_engine(trainer: Any, engines: Any) -> dict[str, Any]:
    engine = trainer.vllm_generation.llm.llm_engine
    config = engine.vllm_config
    return {
        # As the files have it, for the card that is asked about; and what that is of the device that stands for it.
        "vllm_gpu_memory_utilization": engines.arguments.get("gpu_memory_utilization"),
        "engine_share_of_device": config.cache_config.gpu_memory_utilization,
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

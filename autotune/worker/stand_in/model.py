"""Model of a generic step: built from a config alone, then given adapters, all on meta."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ..tracing import Untraceable, fake_models

# PEFT's names of adapter settings that differ from those of TRL's ModelConfig.
PEFT_NAMES = {
    "lora_r": "r",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_task_type": "task_type",
}


def build(spec: Mapping[str, Any], attention: str | None, *, device: str = "meta", scores: bool = False) -> Any:
    """Build the base model with the requested number of layers."""
    model_spec, trust = dict(spec["model"]), bool(spec.get("trust_remote_code"))
    config = fake_models.config_of(model_spec, model_spec.get("folder") if trust else None, trust_remote_code=trust)
    dtype = getattr(torch, model_spec["dtype"])
    model = fake_models.build(config, dtype, attention, device=device, trust_remote_code=trust, scores=scores)
    model.config._name_or_path = model.name_or_path = model_spec["name"]
    return model


def adapt(model: Any, adapter: Mapping[str, Any] | None, *, widened: bool = True) -> Any:
    """Add PEFT's own adapter modules; `widened`: in float32, as PEFT creates them by default."""
    if not adapter:
        return model
    import peft

    settings = {PEFT_NAMES.get(name, name): value for name, value in adapter.items() if value is not None}
    unknown = sorted(set(settings) - set(inspect.signature(peft.LoraConfig).parameters))
    if unknown:
        raise Untraceable(f"PEFT {peft.__version__} has no adapter setting {', '.join(unknown)}")
    settings.setdefault("task_type", "CAUSAL_LM")
    more = {}
    if "autocast_adapter_dtype" in inspect.signature(peft.get_peft_model).parameters:
        more["autocast_adapter_dtype"] = widened
    with fake_models.adapters_on_meta():
        return peft.get_peft_model(model, peft.LoraConfig(**settings), **more)

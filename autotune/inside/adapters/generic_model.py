"""The model of a generic step: built from a config alone, then given adapters, all on meta."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ..tracing import Untraceable, fake

PEFT_NAMES = {
    "lora_r": "r",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_task_type": "task_type",
}
"""Settings that PEFT knows by another name than TRL's ModelConfig; the others have the same."""


def build(spec: Mapping[str, Any]) -> Any:
    """The base model, with as many layers as asked for."""
    asked, trust = dict(spec["model"]), bool(spec.get("trust_remote_code"))
    if (asked.get("config") or {}).get("auto_map") and not trust:
        raise Untraceable(f"{asked['name']} brings code of its own: say --trust-remote-code to have it followed")
    config = fake.config_of(asked, asked.get("folder") if trust else None, trust_remote_code=trust)
    dtype = getattr(torch, asked["dtype"])
    model = fake.build(config, dtype, asked.get("attn_implementation"), trust_remote_code=trust)
    model.config._name_or_path = model.name_or_path = asked["name"]
    return model


def adapt(model: Any, adapter: Mapping[str, Any] | None, *, widened: bool = True) -> Any:
    """With PEFT's own modules, in float32 where PEFT makes them so."""
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
    with fake.adapters_on_meta():
        return peft.get_peft_model(model, peft.LoraConfig(**settings), **more)

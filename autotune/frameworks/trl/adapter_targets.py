"""Layers that an adapter changes, and its dropout, where neither the user nor PEFT names them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec

from autotune.core.candidate import KnobValue
from autotune.core.workload import Workload

EVERY_LINEAR_LAYER = "all-linear"
"""PEFT's name of all linear layers except the output projection."""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model_types: frozenset[str]


def assumed_adapter(workload: Workload) -> dict[str, KnobValue]:
    """Return the adapter settings that must be written out for this model; empty: the script, the
    user's file or PEFT names the layers."""
    stated = {**workload.held, **workload.user_settings}
    config = workload.model.config
    if workload.script is not None or stated.get("lora_target_modules") or stated.get("lora_target_parameters"):
        return {}
    if config.get("model_type") in _types_known_to_peft():
        return {}
    # Experts are stacked parameters, which PEFT adapts without dropout only.
    return {"lora_target_modules": EVERY_LINEAR_LAYER, **({"lora_dropout": 0.0} if _has_experts(config) else {})}


def _has_experts(config: Mapping[str, object]) -> bool:
    return any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


@cache
def _types_known_to_peft() -> frozenset[str]:
    import msgspec.yaml

    text = resources.files("autotune.frameworks.trl").joinpath("adapter_targets.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=_Table).model_types

"""Layers of a model's decoder, without those of its vision and audio towers."""

from __future__ import annotations

from typing import Any

TOWERS = frozenset({"visual", "vision_tower", "vision_model", "audio_tower"})


def layers_of(model: Any) -> list[Any]:
    """Return the longest ModuleList outside towers; empty without one."""
    import torch

    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and TOWERS.isdisjoint(name.split("."))
    ]
    return max((list(layers) for layers in found), key=len, default=[])

"""Optimizer that a script builds itself and passes to its trainer, as the setting that has its
states.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol import Settings

_SETTINGS: Mapping[str, str] = {
    "AdamW": "adamw_torch",
    "Adam": "adamw_torch",
    "NAdam": "adamw_torch",
    "RAdam": "adamw_torch",
    "SGD": "sgd",
    "RMSprop": "rmsprop",
    "Adagrad": "adagrad",
    "Adafactor": "adafactor",
    "AdamW8bit": "adamw_8bit",
    "Adam8bit": "adamw_8bit",
    "PagedAdamW": "paged_adamw_32bit",
    "PagedAdamW32bit": "paged_adamw_32bit",
    "PagedAdamW8bit": "paged_adamw_8bit",
    "Lion": "lion_32bit",
    "Lion8bit": "lion_8bit",
    "PagedLion8bit": "paged_lion_8bit",
}
"""Class of an optimizer -> setting whose states are as large."""

_USUAL = "adamw_torch"
FURTHER_STATES = ("amsgrad", "momentum", "centered")
"""Options by which an optimizer has one state more than its setting."""


def own_optimizer(arguments: Settings) -> tuple[str, str] | None:
    """Return setting and description of a trainer's ready-made optimizer; None: it has none."""
    optimizer = next(iter(arguments.get("optimizers") or ()), None)
    if optimizer is not None:
        name = type(optimizer).__name__
        options = getattr(optimizer, "defaults", {})
    elif arguments.get("optimizer_cls_and_kwargs"):
        optimizer_class, options = arguments["optimizer_cls_and_kwargs"]
        name = optimizer_class.__name__
    else:
        return None
    setting = _SETTINGS.get(name, _USUAL)
    further = [option for option in FURTHER_STATES if options.get(option)]
    description = f"{name} with {' and '.join(further)}" if further else name
    return setting, f"{description} as {setting}"

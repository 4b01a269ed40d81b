"""Report what a script does beside the arguments of its trainer, and what no prediction counts:
methods and models of its own, options of an adapter, weights that it trains as well.

Each is reported by its kind, for which the command has a sentence with its direction.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..dataset_sizes import listed
from ..protocol import Settings
from . import script_models
from .absent_parts import AbsentParts
from .captured_trainer import CapturedTrainer
from .placeholder import Anything
from .source_calls import is_library

OWN_STEP = (
    "compute_loss",
    "_compute_loss",
    "training_step",
    "create_optimizer",
    "concatenated_forward",
    "_generate_and_score_completions",
    "_get_per_token_logps",
    "_get_per_token_logps_and_entropies",
    "_prepare_inputs",
)
"""Methods of a trainer that decide what a step allocates."""

OPTIONS_OF_ADAPTER = (
    "bias",
    "exclude_modules",
    "layers_to_transform",
    "layer_replication",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
)
"""Options of PEFT that change how many weights are trained, and that no setting has."""

_WITHOUT_EFFECT: tuple[Any, ...] = (None, "none", {}, [], ())
MILLION = 1_000_000


def report_beside(captured: CapturedTrainer, absent: AbsentParts) -> None:
    if captured.stopped is not None:
        absent.report("stopped", captured.stopped)
    for name in captured.replaced:
        absent.report("replaced part", f"trainer.{name}")
    for name in _own_methods(captured.trainer_class):
        absent.report("own method", f"{captured.trainer_class.__name__}.{name}")
    if _has_code_for_reference(captured.trainer_class):
        absent.report("own reference", captured.trainer_class.__name__)
    arguments = captured.arguments
    _report_model_class(arguments["model"], absent)
    _report_changed(arguments["model"], absent)
    _report_adapter(arguments, absent)
    _report_trained(arguments["model"], absent)
    _report_loaders(captured, absent)


def _own_methods(trainer_class: Any) -> Iterator[str]:
    """Yield the methods of a step that a class of the script's own replaces."""
    for name in OWN_STEP:
        method = getattr(trainer_class, name, None)
        code = getattr(method, "__code__", None)
        if code is not None and not is_library(code.co_filename):
            yield name


def _has_code_for_reference(trainer_class: Any) -> bool:
    """Return True if a class of the script's own assigns a reference model when it is built."""
    code = getattr(trainer_class.__init__, "__code__", None)
    if code is None or is_library(code.co_filename):
        return False
    return "ref_model" in code.co_names


# Model.


def _report_model_class(model: Any, absent: AbsentParts) -> None:
    """Report a class of the script's own for its model, with the parameters that it adds."""
    if isinstance(model, str) or not hasattr(model, "parameters"):
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    own_class = type(base)
    if is_library(inspect.getsourcefile(own_class) or "") or not hasattr(base, "config"):
        return
    parent = next(owner for owner in own_class.__mro__ if owner.__module__ != own_class.__module__)
    absent.report("own model", f"{own_class.__name__} as {parent.__name__}")


def _report_changed(model: Any, absent: AbsentParts) -> None:
    """Report a model from which the script took layers, or to which it gave some."""
    if not hasattr(model, "parameters"):
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    loaded = script_models.count_at_load(base)
    count = script_models.count_of(base)
    if loaded is None or _are_close(count, loaded):
        return
    with torch.device("meta"):
        expected = script_models.count_of(type(base)(base.config))
    if not _are_close(count, expected):
        absent.report("changed model", f"{count / MILLION:.0f} of {expected / MILLION:.0f}")


def _are_close(count: int, expected: int) -> bool:
    return abs(count - expected) <= expected / 1000


def _report_adapter(arguments: Settings, absent: AbsentParts) -> None:
    adapters = [arguments.get("peft_config")]
    if adapters == [None]:
        configs = getattr(arguments["model"], "peft_config", None)
        adapters = list(configs.values()) if isinstance(configs, Mapping) else []
    for adapter in adapters:
        for name in OPTIONS_OF_ADAPTER:
            value = getattr(adapter, name, None)
            if value not in _WITHOUT_EFFECT and not isinstance(value, Anything):
                absent.report("adapter option", f"{name}={value}")


def _report_trained(model: Any, absent: AbsentParts) -> None:
    """Report weights that are trained whole, and are none of the adapter's."""
    if not hasattr(model, "peft_config") or isinstance(model, Anything):
        return
    count = 0
    for name, parameter in model.named_parameters():
        is_of_adapter = "lora_" in name or "modules_to_save" in name
        if parameter.requires_grad and not is_of_adapter:
            count += parameter.numel()
    if count:
        absent.report("trained beside adapter", f"{count / MILLION:.1f} million")


# Models that code loads later.


def _report_loaders(captured: CapturedTrainer, absent: AbsentParts) -> None:
    for reward in listed(captured.arguments.get("reward_funcs")):
        loaders = sorted(set(script_models.loaders_in(reward, is_library)))
        if loaders:
            name = getattr(reward, "__name__", type(reward).__name__)
            absent.report("reward's model", f"{name} ({', '.join(loaders)})")
    if captured.is_own:
        return  # a copy of TRL's constructor, which loads the policy
    owner = captured.trainer_class
    loaders = sorted(set(script_models.loaders_in(owner.__init__, is_library)))
    if loaders:
        absent.report("trainer's model", f"{owner.__name__} ({', '.join(loaders)})")

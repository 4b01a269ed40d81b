"""Settings of the LoRA adapter, and those that must be written out because PEFT has no default."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

import msgspec

from autotune.core.job import Task, Workload
from autotune.core.space import Knobs, KnobValue
from autotune.core.yaml_document import packaged_table, read_list
from autotune.frameworks.trl.field_list import default

TARGETS = "lora_target_modules"
LORA_SETTINGS = ("lora_r", "lora_alpha", "lora_dropout")

# PEFT's task of a reward model: its default wraps a model that generates, and trains no score.
SCORING_TASK = "SEQ_CLS"

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Settings of config.json that only models with experts have."""


def adapter_settings(chosen: Knobs, task: Task) -> dict[str, KnobValue]:
    """Return whether an adapter is trained, its settings, and the quantisation below it."""
    tuning = task.workload.tuning
    use_peft = chosen.get("use_peft", tuning != "full")
    settings: dict[str, KnobValue] = {"use_peft": use_peft}
    if use_peft:
        for name in LORA_SETTINGS:
            settings[name] = default(name)
        settings |= assumed_adapter(task.workload)
        for name in settings.keys() & chosen.keys():
            settings[name] = chosen[name]
    if tuning == "qlora":
        settings["load_in_4bit"] = chosen.get("load_in_4bit", True)
    return settings


def pattern_of_modules(text: str) -> str:
    """Return PEFT's pattern for a list of modules, `["q_proj", "v_proj"]`, which is no value of a
    setting: each name is the end of a module's path. Any other text stays as it is.
    """
    modules = read_list(text)
    if not modules:
        return text
    return pattern_of_names(map(str, modules))


def pattern_of_names(modules: Iterable[str]) -> str:
    names = "|".join(map(re.escape, modules))
    return rf"(.*\.)?({names})"


def targets_of_script(modules: object) -> object:
    """Return the modules of a script's adapter. TRL takes a list of one for a pattern of the whole
    path, which PEFT, to which the script gives it, does not.
    """
    if isinstance(modules, list) and len(modules) == 1:
        return pattern_of_names(modules)
    return modules


def assumed_adapter(workload: Workload) -> dict[str, KnobValue]:
    """Return the settings that must be written out; none if script, user's file or PEFT names the
    layers.
    """
    if workload.script is not None:
        return {}
    assumed: dict[str, KnobValue] = {}
    if workload.method == "reward":
        assumed["lora_task_type"] = SCORING_TASK
    stated = {**workload.held_values, **workload.user_settings}
    config = workload.model.config
    if stated.get("lora_target_modules") or stated.get("lora_target_parameters"):
        return assumed
    if config.get("model_type") in types_known_to_peft():
        return assumed
    # PEFT's name of all linear layers except the output projection.
    assumed["lora_target_modules"] = "all-linear"
    # Experts are stacked parameters, which PEFT adapts without dropout only.
    if any(config.get(name) for name in EXPERT_COUNTS):
        assumed["lora_dropout"] = 0.0
    return assumed


class _AdapterTargets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model_types: frozenset[str]


@cache
def types_known_to_peft() -> frozenset[str]:
    """Return the model types for which PEFT itself selects the layers of an adapter."""
    table = packaged_table("autotune.frameworks.trl", "adapter_targets.yaml", _AdapterTargets)
    return table.model_types

"""From a request's flat settings to the framework's own configuration objects.

Settings are named as `trl grpo --config` names them. What would leave a trace outside of the probe's scratch folder, or
would change how much of the loop runs, is overruled here, and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NO_SIDE_EFFECTS: Mapping[str, Any] = {
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "push_to_hub": False,
    "hub_model_id": None,
    "log_completions": False,
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
    "disable_tqdm": True,
    "do_eval": False,
}
"""A probe writes to no output folder, no hub and no tracker."""

AS_A_PROBE: Mapping[str, Any] = {
    # A step of length nothing costs what any step costs, and leaves the weights as they were for the next candidate.
    "learning_rate": 0.0,
    "weight_decay": 0.0,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    # Forced lengths are truncated ones: masking them would empty the loss.
    "mask_truncated_completions": False,
    # The model is given ready-made.
    "model_init_kwargs": None,
    "auto_find_batch_size": False,
}

BY_THE_LOAD = frozenset({"dtype", "model_name_or_path", "model_revision", "trust_remote_code"})
"""Settings that were settled when the model was loaded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """What is forced on one run of the loop."""

    prompt: int | None
    """Tokens of the longest prompt; None leaves prompts as they are."""

    completion: int
    """Tokens that every completion is forced to."""

    pad_prompts: bool
    """Whether every prompt is brought to exactly `prompt` tokens, or longer ones are only cut to it."""


def split(settings: Mapping[str, Any], config_class: Any, model_config_class: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The training arguments and the model arguments. A name that is neither is an error: the framework would refuse it too."""
    training_names = {field.name for field in dataclasses.fields(config_class)}
    model_names = {field.name for field in dataclasses.fields(model_config_class)}
    unknown = sorted(set(settings) - training_names - model_names)
    if unknown:
        raise TypeError(f"{config_class.__name__} and {model_config_class.__name__} know no setting {', '.join(unknown)}")
    training = {name: value for name, value in settings.items() if name in training_names}
    model = {name: value for name, value in settings.items() if name in model_names - BY_THE_LOAD}
    return training, model


def training_arguments(
    settings: Mapping[str, Any], *, lengths: Lengths, device: str, max_steps: int, seed: int, folder: Path, known: frozenset[str]
) -> dict[str, Any]:
    """The arguments of the framework's config for one run: the candidate's own, the lengths, and the overrules."""
    arguments = {**settings, **NO_SIDE_EFFECTS, **AS_A_PROBE}
    arguments |= {"output_dir": str(folder), "max_steps": max_steps, "seed": seed, "use_cpu": device == "cpu"}
    if device == "cpu":
        arguments.setdefault("bf16", False)  # the default asks for a GPU
    if arguments.get("use_vllm"):
        arguments.setdefault("vllm_mode", "colocate")
    arguments["generation_kwargs"] = {**(settings.get("generation_kwargs") or {}), **_forced(lengths, arguments)}
    return {name: value for name, value in arguments.items() if name in known}


def model_arguments(settings: Mapping[str, Any], load: Mapping[str, Any], model_config_class: Any) -> dict[str, Any]:
    """The adapter and the attention kernel: the candidate's own, or else what the load names."""
    adapter, model = load.get("adapter"), load["model"]
    named = {"use_peft": True, **adapter} if adapter else {}
    named["attn_implementation"] = model.get("attn_implementation")
    return {name: value for name, value in {**named, **settings}.items() if name in known_fields(model_config_class)}


def _forced(lengths: Lengths, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Every completion exactly as long as asked, in the words of whoever generates."""
    if arguments.get("use_vllm"):
        return {"ignore_eos": True, "min_tokens": lengths.completion, "max_tokens": lengths.completion}
    return {"min_new_tokens": lengths.completion, "max_new_tokens": lengths.completion}


def known_fields(config_class: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(config_class) if field.init)

"""Framework configuration from a request's flat settings, named as in `trl grpo --config`.

Settings that would write outside the probe's scratch folder, or change the extent of the loop, are overridden here and nowhere
else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# No output folder, no hub, no tracker.
NO_SIDE_EFFECTS: Mapping[str, Any] = {
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "push_to_hub": False,
    "hub_model_id": None,
    "log_completions_hub_repo": None,
    "trackio_space_id": None,
    "log_completions": False,
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
    "disable_tqdm": True,
    "do_eval": False,
}
PROBE_OVERRIDES: Mapping[str, Any] = {
    "learning_rate": 0.0,  # such steps cost as much as any other, and leave the weights unchanged for the next candidate
    "weight_decay": 0.0,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "mask_truncated_completions": False,  # completions of a forced length are truncated: no token would be left in the loss
    "model_init_kwargs": None,  # the trainer gets a model object
    "auto_find_batch_size": False,
}

# Settings that the load has applied already.
FIXED_BY_LOAD = frozenset({"dtype", "model_name_or_path", "model_revision", "trust_remote_code"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForcedLengths:
    """Lengths forced on one run of the loop."""

    prompt: int | None  # tokens of the longest prompt; None leaves prompts unchanged
    completion: int  # tokens of each completion
    pad_prompts: bool  # true: each prompt gets exactly `prompt` tokens. False: longer ones are cut
    drawn: tuple[int, ...] = ()  # lengths of which each completion gets one; empty: all have `completion`
    drawn_prompts: tuple[int, ...] = ()  # the same for prompts; empty: as `pad_prompts` says


def split(settings: Mapping[str, Any], config_class: Any, model_config_class: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split settings into training and model arguments. A name of neither is an error."""
    training_names = {field.name for field in dataclasses.fields(config_class)}
    model_names = {field.name for field in dataclasses.fields(model_config_class)}
    unknown = sorted(set(settings) - training_names - model_names)
    if unknown:
        raise TypeError(f"{config_class.__name__} and {model_config_class.__name__} have no setting {', '.join(unknown)}")
    training = {name: value for name, value in settings.items() if name in training_names}
    model = {name: value for name, value in settings.items() if name in model_names - FIXED_BY_LOAD}
    return training, model


def training_arguments(
    config_class: Any, settings: Mapping[str, Any], *, lengths: ForcedLengths, device: str, max_steps: int, seed: int,
    folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of the framework's config: the candidate's settings, lengths, overrides."""
    arguments = {**settings, **NO_SIDE_EFFECTS, **PROBE_OVERRIDES}
    arguments |= {"output_dir": str(folder), "max_steps": max_steps, "seed": seed, "use_cpu": device == "cpu"}
    if device == "cpu":
        arguments.setdefault("bf16", False)  # the default requires a GPU
    count = lengths.completion
    if arguments.get("use_vllm"):
        arguments.setdefault("vllm_mode", "colocate")
        forced = {"ignore_eos": True, "min_tokens": count, "max_tokens": count}
    elif lengths.drawn:  # rows end by themselves, see `drawn_completions`
        forced = {"max_new_tokens": count}
    else:
        forced = {"min_new_tokens": count, "max_new_tokens": count}
    arguments["generation_kwargs"] = {**(settings.get("generation_kwargs") or {}), **forced}
    return {name: value for name, value in arguments.items() if name in known_fields(config_class)}


def model_arguments(settings: Mapping[str, Any], load: Mapping[str, Any], model_config_class: Any) -> dict[str, Any]:
    """Adapter and attention kernel: those of the candidate, else those of the load."""
    adapter = load.get("adapter")
    arguments = {"use_peft": True, **adapter} if adapter else {}
    arguments["attn_implementation"] = load["model"].get("attn_implementation")
    return {name: value for name, value in {**arguments, **settings}.items() if name in known_fields(model_config_class)}


def known_fields(config_class: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(config_class) if field.init)

"""Configuration of the running trainer as a candidate of autotune's search space."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.catalog.space_files import load_space
from autotune.core.errors import AutotuneError
from autotune.core.job import DeviceKind, Hardware, Model, Task, Tuning, Workload
from autotune.core.space import Candidate, KnobValue, SearchSpace
from autotune.frameworks import trainer as trainer_named
from autotune.frameworks.base import Trainer
from autotune.frameworks.settings_table import Field
from autotune.frameworks.trl.user_config import read_user_config

METHODS: Mapping[str, str] = {
    "GRPOTrainer": "grpo",
    "RLOOTrainer": "rloo",
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "KTOTrainer": "kto",
    "RewardTrainer": "reward",
}
"""Class name of the trainer, or of its nearest base class -> method."""

_NOT_A_SETTING = frozenset({"steps_per_generation", "hub_token", "push_to_hub_token", "local_rank"})
"""Derived values, secrets and the position of this process."""

_ADAPTER: Mapping[str, str] = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


@dataclass(frozen=True, kw_only=True)
class Running:
    """Running training job."""

    task: Task
    trainer: Trainer
    space: SearchSpace
    candidate: Candidate
    from_file: bool  # started by `trl ... --config FILE`, so a similar file starts the next run


def running(trainer: Any, limit_bytes: int) -> Running | None:
    """Return the trainer's configuration; None if the space cannot express it."""
    method = next((METHODS[kind.__name__] for kind in type(trainer).__mro__ if kind.__name__ in METHODS), None)
    if method is None:
        return None
    try:
        known = trainer_named("trl", method)
        task = _job(trainer, known, method, limit_bytes, sys.argv[1:])
        space = load_space(known.space).on(task.hardware.count if task.hardware.kind == "cuda" else 0)
        candidate = known.complete(known.baseline(space, task), task)
    except (AutotuneError, OSError, ValueError, TypeError, AttributeError, AssertionError):
        return None
    from_file = task.workload.config_file is not None and task.workload.config_file.is_file()
    return Running(task=task, trainer=known, space=space, candidate=candidate, from_file=from_file)


def _job(trainer: Any, known: Trainer, method: str, limit_bytes: int, arguments: Sequence[str]) -> Task:
    args, fields = trainer.args, known.fields()
    given = _file_behind(arguments)
    file = None if given is None else read_user_config(given, method)
    changed, parts = _changed_arguments(args, fields)
    adapter = _adapter(trainer.model)
    tuning: Tuning = "full"
    if adapter:
        tuning = "qlora" if getattr(trainer.model, "is_loaded_in_4bit", False) else "lora"
    shape = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    kind: DeviceKind = "cuda" if getattr(args.device, "type", "cpu") == "cuda" else "cpu"
    name = str(getattr(trainer.model.config, "_name_or_path", "") or "model")
    folder = Path(name) if Path(name).is_dir() else None
    workload = Workload(
        model=Model(name=name, config=trainer.model.config.to_dict(), folder=folder, origin="the running model"), method=method,
        python=Path(sys.executable), tuning=tuning, weights="real", global_batch=shape,
        config_file=given or Path(args.output_dir) / "training arguments",
        held={**(file.settings if file else {}), **changed, **adapter},
        user_settings={**(file.rest if file else {}), **parts},
    )  # fmt: skip
    hardware = Hardware(kind=kind, name=kind, count=args.world_size, memory_bytes=limit_bytes, here=True)
    return Task(workload=workload, hardware=hardware)


def _file_behind(arguments: Sequence[str]) -> Path | None:
    """Return the YAML file of `trl grpo --config`."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name = following if word == "--config" else word.removeprefix("--config=") if word.startswith("--config=") else ""
        if name.endswith((".yaml", ".yml")) and Path(name).is_file():
            return Path(name).resolve()
    return None


def _changed_arguments(args: Any, fields: Mapping[str, Field]) -> tuple[dict[str, KnobValue], dict[str, object]]:
    """Return the non-default training arguments: (plain values, lists and mappings)."""
    known = {name for name, field in fields.items() if field.owner == "config"} - _NOT_A_SETTING
    changed = {name: value for name, value in args.to_dict().items() if name in known and value != fields[name].default}
    if getattr(args, "steps_per_generation", None) == args.gradient_accumulation_steps:
        # the default relation; a smaller micro-batch keeps it
        changed.pop("generation_batch_size", None)
    plain = {name: value for name, value in changed.items() if value is None or isinstance(value, bool | int | float | str)}
    return plain, {name: value for name, value in changed.items() if isinstance(value, list | dict) and value}


def _adapter(model: Any) -> dict[str, KnobValue]:
    """Return the LoRA settings under the names of `trl grpo --config`."""
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    if config is None:
        return {}
    found = {ours: getattr(config, theirs, None) for theirs, ours in _ADAPTER.items()}
    return {"use_peft": True, **{name: value for name, value in found.items() if isinstance(value, int | float)}}

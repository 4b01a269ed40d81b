"""Out-of-memory report: diagnosis and the next smaller configuration, as files next to the
checkpoints.

The running trainer's configuration becomes a candidate of autotune's search space, from which the
next one is derived. Neutral changes come first. A change of what is learned is the last resort and
is marked as such.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.catalog.space_files import load_space
from autotune.core.errors import AutotuneError
from autotune.core.files import write_atomically
from autotune.core.job import DeviceKind, Hardware, Model, Task, Tuning, Workload
from autotune.core.space import Candidate, KnobValue, SearchSpace
from autotune.diagnosis import Diagnosis, as_document, diagnose_lines
from autotune.diagnosis.diagnosis import in_words
from autotune.diagnosis.next_change import Next, smaller_configuration
from autotune.frameworks import trainer as trainer_named
from autotune.frameworks.base import Field, Trainer
from autotune.frameworks.trl.output_files import with_changes
from autotune.frameworks.trl.user_config import read_user_config
from autotune.integrations.memory_margin import GaugeReading

REPORT_FOLDER = "out-of-memory"
NEXT = "next.yaml"
WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class Running:
    task: Task
    trainer: Trainer
    space: SearchSpace
    candidate: Candidate
    from_file: bool  # started by `trl ... --config FILE`, so a similar file starts the next run


@dataclass(frozen=True, kw_only=True)
class OomMoment:
    """State of the run when memory ran out."""

    rank: int
    world_size: int
    step: int
    reading: GaugeReading | None


def diagnosis_of(error: BaseException) -> Diagnosis:
    """Diagnose an exception by the failure table, like any log."""
    return diagnose_lines("".join(traceback.format_exception(error)).splitlines())


def next_smaller(running: Running, diagnosis: Diagnosis) -> Next | None:
    """Return the first change from the advice that the framework accepts; neutral changes first."""
    return smaller_configuration(
        running.trainer,
        running.task,
        running.space,
        running.candidate,
        diagnosis,
    )


def write(
    folder: Path,
    error: BaseException,
    diagnosis: Diagnosis,
    moment: OomMoment,
    running: Running | None,
) -> tuple[Path, ...]:
    """Write the report of one failing rank.

    Each rank has its own files. The next configuration is the same on all ranks and is replaced
    atomically: rank 0 may not be the failing one, and its launcher may terminate it first.
    """
    following = None
    if running is not None:
        following = next_smaller(running, diagnosis)
    folder.mkdir(parents=True, exist_ok=True)

    # 1. The report, for programs and for people.
    document = folder / f"rank{moment.rank}.json"
    text = folder / f"rank{moment.rank}.txt"
    report = _document(error, diagnosis, moment, following)
    write_atomically(document, f"{json.dumps(report, indent=2, default=str)}\n".encode())
    lines = _lines(error, diagnosis, moment, following)
    write_atomically(text, "\n".join(lines).encode())

    # 2. The next configuration.
    if running is None or following is None:
        return document, text
    write_atomically(folder / NEXT, _configuration(running, following, moment).encode())
    return document, text, folder / NEXT


def _document(
    error: BaseException,
    diagnosis: Diagnosis,
    moment: OomMoment,
    following: Next | None,
) -> dict[str, Any]:
    document: dict[str, Any] = {
        **as_document(diagnosis),
        "error": {"type": type(error).__name__, "text": str(error)},
        "rank": moment.rank,
        "world_size": moment.world_size,
        "step": moment.step,
        "memory": None,
        "next": None,
    }
    if moment.reading is not None:
        document["memory"] = dataclasses.asdict(moment.reading)
    if following is not None:
        document["next"] = {
            "change": dict(following.change),
            "changes_what_is_learned": following.learning,
            "file": NEXT,
        }
    return document


def _lines(
    error: BaseException,
    diagnosis: Diagnosis,
    moment: OomMoment,
    following: Next | None,
) -> list[str]:
    lines = [
        f"Rank {moment.rank} of {moment.world_size}, after step {moment.step}.",
        in_words(diagnosis, WIDTH),
    ]
    if following is not None:
        lines.append(
            f"Next smaller configuration, in {NEXT}: {_assignments(following.change)}."
            f" {_effect_text(following)}"
        )
    return [*lines, "", "".join(traceback.format_exception(error))]


def _configuration(
    running: Running,
    following: Next,
    moment: OomMoment,
) -> str:
    before = {}
    flags = []
    arguments = []
    for name, value in following.change.items():
        before[name] = running.candidate.settings.get(name)
        flags.append(f"--{name} {_text(value)}")
        arguments.append(f"{name}={value!r}")
    notes = [
        _effect_text(following),
        (
            f"Memory ran out after step {moment.step}. Changed: {_assignments(following.change)}"
            f" (before: {_assignments(before)})."
        ),
        f"Nothing was measured: autotune preflight {NEXT} --dry-run proves that it fits.",
        f"As flags: {' '.join(flags)}",
        f"In Python: {', '.join(arguments)}",
    ]
    if not running.from_file:
        notes.append(
            "The run was not started from a file: its data, rewards and model stay where they are,"
            " in the script."
        )
    head = "".join(f"# {note}\n" for note in notes)
    return head + yaml.safe_dump(
        with_changes(following.candidate, running.task), sort_keys=False, allow_unicode=True
    )


def _effect_text(following: Next) -> str:
    if following.learning:
        return "CHANGES WHAT IS LEARNED: nothing else was left."
    return "What is learned stays the same."


def _assignments(change: Mapping[str, object]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in change.items())


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


METHODS_BY_TRAINER: Mapping[str, str] = {
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

_ADAPTER: Mapping[str, str] = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
}


def running(trainer: Any, limit_bytes: int) -> Running | None:
    """Return the trainer's configuration; None if the space cannot express it."""
    method = next(
        (
            METHODS_BY_TRAINER[kind.__name__]
            for kind in type(trainer).__mro__
            if kind.__name__ in METHODS_BY_TRAINER
        ),
        None,
    )
    if method is None:
        return None
    try:
        framework = trainer_named("trl", method)
        task = _job(trainer, framework, method, limit_bytes, sys.argv[1:])
        gpus = task.hardware.count if task.hardware.kind == "cuda" else 0
        space = load_space(framework.space).on(gpus)
        candidate = framework.complete(framework.baseline(space, task), task)
    except (AutotuneError, OSError, ValueError, TypeError, AttributeError, AssertionError):
        return None
    from_file = task.workload.config_file is not None and task.workload.config_file.is_file()
    return Running(
        task=task,
        trainer=framework,
        space=space,
        candidate=candidate,
        from_file=from_file,
    )


def _job(
    trainer: Any,
    framework: Trainer,
    method: str,
    limit_bytes: int,
    arguments: Sequence[str],
) -> Task:
    # 1. Settings: of the file, and what the running arguments say otherwise.
    args = trainer.args
    fields = framework.fields()
    config_file = _file_behind(arguments)
    changed, parts = _changed_arguments(args, fields)
    adapter = _adapter(trainer.model)
    held_values = {**changed, **adapter}
    user_settings = parts
    if config_file is not None:
        file = read_user_config(config_file, method)
        held_values = {**file.settings, **held_values}
        user_settings = {**file.rest, **user_settings}

    # 2. The model and its devices.
    tuning: Tuning = "full"
    if adapter:
        tuning = "qlora" if getattr(trainer.model, "is_loaded_in_4bit", False) else "lora"
    shape = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    kind: DeviceKind = "cuda" if getattr(args.device, "type", "cpu") == "cuda" else "cpu"
    name = str(getattr(trainer.model.config, "_name_or_path", "") or "model")
    folder = Path(name) if Path(name).is_dir() else None
    workload = Workload(
        model=Model(
            name=name,
            config=trainer.model.config.to_dict(),
            folder=folder,
            origin="the running model",
        ),
        method=method,
        python=Path(sys.executable),
        tuning=tuning,
        weights="real",
        global_batch=shape,
        config_file=config_file or Path(args.output_dir) / "training arguments",
        held_values=held_values,
        user_settings=user_settings,
    )
    hardware = Hardware(
        kind=kind,
        name=kind,
        count=args.world_size,
        memory_bytes=limit_bytes,
        here=True,
    )
    return Task(workload=workload, hardware=hardware)


def _file_behind(arguments: Sequence[str]) -> Path | None:
    """Return the YAML file of `trl grpo --config`."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name = ""
        if word == "--config":
            name = following
        elif word.startswith("--config="):
            name = word.removeprefix("--config=")
        if name.endswith((".yaml", ".yml")) and Path(name).is_file():
            return Path(name).resolve()
    return None


def _changed_arguments(
    args: Any, fields: Mapping[str, Field]
) -> tuple[dict[str, KnobValue], dict[str, object]]:
    """Return the non-default training arguments: (plain values, lists and mappings)."""
    omitted = set(_NOT_A_SETTING)
    if getattr(args, "steps_per_generation", None) == args.gradient_accumulation_steps:
        omitted.add("generation_batch_size")  # the default relation; a smaller micro-batch keeps it
    plain: dict[str, KnobValue] = {}
    parts: dict[str, object] = {}
    for name, value in args.to_dict().items():
        is_setting = name in fields and fields[name].owner == "config" and name not in omitted
        if not is_setting or value == fields[name].default:
            continue
        if value is None or isinstance(value, bool | int | float | str):
            plain[name] = value
        elif isinstance(value, list | dict) and value:
            parts[name] = value
    return plain, parts


def _adapter(model: Any) -> dict[str, KnobValue]:
    """Return the LoRA settings under the names of `trl grpo --config`."""
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    if config is None:
        return {}
    settings: dict[str, KnobValue] = {"use_peft": True}
    for field, setting in _ADAPTER.items():
        value = getattr(config, field, None)
        if isinstance(value, int | float):
            settings[setting] = value
    return settings

"""Request -> Job: looks up names, checks values, and lists assumptions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard, cast

from autotune import frameworks
from autotune.catalog import model_lookup, space_files
from autotune.core.dataset import TokenLengths, refuse_unreadable
from autotune.core.errors import BadInput, IllegalConfiguration
from autotune.core.files import sqlite_url
from autotune.core.job import Job, Mode, Model, Task, Tuning, Workload
from autotune.core.space import Candidate, KnobValue, SearchSpace
from autotune.core.units import parse_seconds
from autotune.frameworks import shares_in_files
from autotune.frameworks.base import Trainer
from autotune.frameworks.trl.settings import OFFLINE
from autotune.frameworks.trl.user_config import UserConfig, read_user_config
from autotune.machine import environment
from autotune.probe.device_report import gpu_notes
from autotune.request import length_sources
from autotune.request.assignments import (
    held_by,
    named_choices,
    parse_holds,
    positive,
    with_exported,
)
from autotune.request.flags import Flags
from autotune.request.length_sources import with_images
from autotune.request.resources import (
    measuring_mode,
    memory_limit,
    restrict_to_installed,
    storage_url,
    target_hardware,
)
from autotune.request.user_scripts import read_launch, read_script

MAX_VERIFIED_GPUS = (
    1  # GPUs per machine on which autotune itself has been tested; more of them add a note
)
SEVERAL_GPUS = "several GPUs: tested over gloo on CPUs, and not verified on several GPUs yet"

AUTO, DEFAULT_BUDGET_S = "auto", 1200.0

_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """Job with the assumptions and notes for the reader."""

    job: Job
    trainer: Trainer
    assumed: tuple[str, ...]  # defaults of the space that no flag states
    notes: tuple[str, ...]  # deviations from what one would expect
    named: Mapping[str, tuple[KnobValue, ...]]  # knob values that flags name; each must be possible
    whole_space: SearchSpace  # space before anything was held; advice may change all of it
    pinned: frozenset[str] = frozenset()  # settings of --hold, which are never relaxed


def parse_framework_request(flags: Flags) -> ParsedRequest:
    """Build the job without measuring. BadInput and its subclasses contain the fix."""
    refuse_resume_and_fresh(flags)
    if flags.offline:
        model_lookup.stay_offline()

    # 1. Trainer, hardware, model and configuration.
    own = read_launch(flags) if flags.from_command is not None else None
    flags = own.flags if own else flags
    hardware = target_hardware(flags)
    if flags.script is not None:
        own = read_script(flags, hardware)
    elif flags.rewards != "real":
        raise BadInput(
            "--rewards is about a script of your own.",
            way_out="Add --script FILE, or leave it out.",
        )
    flags = _as_the_space(own.flags if own else flags, own is not None)
    trainer = own.trainer if own else frameworks.trainer(flags.framework, flags.method)
    space = whole = space_files.load_space(flags.space or trainer.space).on(
        hardware.count if hardware.kind == "cuda" else 0
    )
    settings = _settings(trainer)
    flags, exported = with_exported(flags, space, settings, hardware)
    config = own.config if own else _config(flags, trainer)
    model = own.model if own and own.model else _model(flags, config)
    tuning = _tuning(flags, config, space)

    # 2. Held and searched knobs: flags override the configuration file.
    named = named_choices(flags, space, tuning, settings, trainer.canonical)
    tuning_settings = (
        {}
        if flags.tuning is None
        else {"use_peft": tuning != "full", "load_in_4bit": tuning == "qlora"}
    )
    python = environment.interpreter(flags.python)
    script = own.script if own else None
    defaults = (
        trainer.trained_defaults(config.settings, config.rest, space, python)
        if config and not script
        else {}
    )
    from_file: dict[str, KnobValue] = {
        **defaults,
        **(config.settings if config else {}),
        **tuning_settings,
    }
    limit_bytes, typed = memory_limit(flags, hardware), held_by(flags, trainer.canonical)
    if config is not None:  # its shares are of the whole GPU, those of flags of the limit
        scale = shares_in_files.scale_of(hardware, limit_bytes)
        from_file = shares_in_files.within_limit(from_file, scale, trainer.fields())
    held = _overridden(from_file, typed)
    stated = held if flags.global_batch is None else {**held, "global_batch": flags.global_batch}
    space = _with_configuration(space.with_choices(named), trainer, held, stated, named)

    # 3. Training environment.
    mode = measuring_mode(flags, hardware, trainer)
    space, notes = restrict_to_installed(space, python, flags, trainer, hardware, mode)

    # 4. The job, and notes for the reader.
    lengths = _lengths(flags)
    typical = positive("--typical-completion-length", flags.typical_completion_length)
    workload = Workload(
        model=model,
        method=flags.method,
        framework=flags.framework,
        python=python,
        tuning=tuning,
        weights=flags.weights,
        global_batch=_global_batch(flags, config, held, space, hardware.count, trainer),
        typical_completion_length=typical
        or (None if lengths is None else max(1, round(lengths.mean))),
        completion_lengths=lengths,
        prompt_lengths=_prompt_lengths(flags),
        dataset=flags.dataset or (config.dataset if config else None),
        config_file=config.path if config else None,
        held=held,
        user_settings=dict(config.rest) if config else {},
        stated={**config.settings, **config.rest, **config.moved} if config else {},
        defaults={
            name: value
            for name, value in defaults.items()
            if held[name] == value and name not in tuning_settings
        },
        launch=own.launch if own else None,
        script=script,
        trust_remote_code=bool(held.get("trust_remote_code", False)),
        seed=flags.seed,
    )
    if workload.dataset is not None:
        refuse_unreadable(workload.dataset)
    workload, image_notes = with_images(flags, workload, hardware, trainer)
    subject = workload.model.name.rstrip("/").split("/")[-1]
    job = build_job(
        f"{subject}-{flags.method}", flags, Task(workload=workload, hardware=hardware), space, mode
    )
    notes += [*exported, *image_notes, *_notes(flags, job, trainer, config)]
    if config is not None:
        unchanged = {name: v for name, v in config.settings.items() if name not in typed}
        notes += shares_in_files.file_notes(unchanged, held, hardware, limit_bytes)
    _refuse_illegal_config(job, trainer, from_file)
    return ParsedRequest(
        job=job,
        trainer=trainer,
        assumed=tuple(_assumed(flags, config, job, trainer)),
        notes=tuple(notes),
        named=named,
        whole_space=whole,
        pinned=frozenset(parse_holds(flags.hold)),
    )


def _notes(flags: Flags, job: Job, trainer: Trainer, config: UserConfig | None) -> Iterator[str]:
    """Yield the deviations from what one would expect."""
    hardware, lengths = job.task.hardware, job.task.workload.completion_lengths
    if lengths is not None:
        yield length_sources.description(lengths)
    yield from config.notes if config else ()
    if config is not None and config.processes not in (None, hardware.count):
        yield (
            f"{hardware.count} ranks, by --gpus; the file of the launcher has num_processes"
            f" {config.processes}"
        )
    if hardware.emulated:
        yield (
            f"{hardware}: memory is emulated, speed is predicted, nothing is measured"
            " (docs/emulated-gpus.md)"
        )
    elif not hardware.here:
        yield (
            f"{hardware} is not on this machine: everything that follows is predicted, nothing is"
            " measured"
        )
    elif job.mode == "predict" and flags.mode == "auto":
        yield (
            f"{trainer.method} with {trainer.name} is not measured yet: everything that follows is"
            " predicted"
        )
    if hardware.kind == "cuda" and hardware.count > MAX_VERIFIED_GPUS and not hardware.emulated:
        yield SEVERAL_GPUS
    if job.mode != "predict":
        yield from trainer.notes(job.space, job.task)
    if job.mode == "probe":
        yield from gpu_notes(hardware, job.memory_limit_bytes)


def _lengths(flags: Flags) -> TokenLengths | None:
    if flags.lengths is None:
        return None
    if flags.method in OFFLINE:
        raise BadInput(
            f"--lengths {flags.lengths}: {flags.method} trains on given rows and generates no"
            " completions.",
            way_out="Leave it out; --dataset states the lengths of your rows.",
        )
    return length_sources.read(flags.lengths)


def _prompt_lengths(flags: Flags) -> TokenLengths | None:
    if flags.prompt_lengths is not None and flags.lengths is None:
        raise BadInput(
            f"--prompt-lengths {flags.prompt_lengths}: without --lengths they change nothing.",
            way_out="Give --lengths, the completions that occur, as well.",
        )
    return (
        None if flags.prompt_lengths is None else length_sources.read_prompts(flags.prompt_lengths)
    )


def _as_the_space(flags: Flags, scripted: bool) -> Flags:
    """Return the flags with the framework and method of `--space`, unless others are stated."""
    if flags.space is None:
        return flags
    space, defaults = space_files.load_space(flags.space), Flags()
    stated = [
        f"--{name} {getattr(flags, name)}"
        for name in ("framework", "method")
        if getattr(flags, name) != getattr(space, name)
        and (scripted or getattr(flags, name) != getattr(defaults, name))
    ]
    if stated:
        raise BadInput(
            f"--space: {flags.space} is for {space.method} with {space.framework}, not for"
            f" {' '.join(stated)}.",
            way_out=(
                "Name a space of `autotune show spaces` that is, or leave out"
                f" {'it' if scripted else ' and '.join(stated)}."
            ),
        )
    return flags.replace(framework=space.framework, method=space.method)


def refuse_resume_and_fresh(flags: Flags) -> None:
    if flags.resume and flags.fresh:
        raise BadInput(
            "--resume continues a study and --fresh discards it.", way_out="Give one of the two."
        )


def candidate_of_job(request: ParsedRequest) -> Candidate:
    """Return the candidate of `predict`: given values, else the framework's defaults."""
    job, trainer = request.job, request.trainer
    candidate = trainer.complete(trainer.baseline(job.space, job.task), job.task)
    reason = trainer.why_illegal(candidate, job.task)
    if reason is not None:
        raise IllegalConfiguration(
            f"This can't be trained as it is: {reason}",
            way_out="Change it with --set, and run again.",
        )
    return candidate


def _config(flags: Flags, trainer: Trainer) -> UserConfig | None:
    if flags.config and not trainer.reads_config:
        raise BadInput(
            f"--config reads TRL's files, and not {trainer.name}'s.",
            way_out=(
                f"Give {trainer.name}'s settings one by one, under their own names: --set"
                f" {next(iter(trainer.fields()))}=..."
            ),
        )
    return read_user_config(Path(flags.config), flags.method) if flags.config else None


def _settings(trainer: Trainer) -> list[str]:
    """Return settings that --hold and --set accept besides the space's knobs."""
    known = {name for name, field in trainer.fields().items() if field.owner in ("config", "model")}
    return sorted((known | trainer.own_settings) - {"model_name_or_path"})


def _model(flags: Flags, config: UserConfig | None) -> Model:
    name = flags.model or (config.model if config else None)
    if name is None:
        raise BadInput(
            "No model was named.",
            way_out="Type --model Qwen2.5-7B, or --model FOLDER with a config.json.",
        )
    model = model_lookup.find_model(name)
    if flags.weights == "real" and not model_lookup.has_weights(model.folder):
        raise BadInput(
            f"--weights real needs the weights of {model.name} on this machine, and only its shape"
            " is here.",
            way_out=(
                f"Fetch them with `hf download {model.name}`, or leave --weights out: memory and"
                " speed are the same."
            ),
        )
    return model


def _tuning(flags: Flags, config: UserConfig | None, space: SearchSpace) -> Tuning:
    if flags.tuning is not None:
        return cast(Tuning, flags.tuning)
    if config is None:
        return cast(Tuning, space.assume.get("tuning", "lora"))
    if not config.settings.get("use_peft", False):
        return "full"
    return "qlora" if config.settings.get("load_in_4bit", False) else "lora"


def _with_configuration(
    space: SearchSpace,
    trainer: Trainer,
    held: Mapping[str, KnobValue],
    stated: Collection[str],
    named: Collection[str],
) -> SearchSpace:
    """Return the space around a configuration. Its learning knobs are held. Neutral ones may
    change, and its own numbers join theirs: otherwise it would be the baseline but no candidate,
    and could be neither confirmed nor kept. Knobs that other stated settings determine are left
    out: a second value would contradict them.
    """
    implied = {
        knob
        for knob, others in trainer.equivalent_settings.items()
        if knob not in stated and knob not in named and all(other in stated for other in others)
    }
    space = replace(space, knobs=tuple(knob for knob in space.knobs if knob.name not in implied))
    learning, choices = (
        {knob.name for knob in space.learning_knobs(held)},
        dict[str, tuple[KnobValue, ...]](),
    )
    for knob in space.knobs:
        own, numbers = held.get(knob.name), [value for value in knob.choices if _is_number(value)]
        if knob.name in named or own is None:
            continue
        if knob.name in learning:
            choices[knob.name] = (own,)
        elif _is_number(own) and numbers and own not in numbers:
            rest = [value for value in knob.choices if not _is_number(value)]
            falls = numbers == sorted(numbers, reverse=True) and len(numbers) > 1
            choices[knob.name] = (*rest, *sorted([*numbers, own], reverse=falls))
    return space.with_choices(choices)


def _is_number(value: KnobValue) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _overridden(
    from_file: Mapping[str, KnobValue], typed: Mapping[str, KnobValue]
) -> dict[str, KnobValue]:
    """Merge flags over file settings; a new micro-batch drops the file's accumulation."""
    micro, steps = _BATCH
    derived = {steps} if micro in typed and steps not in typed else set()
    return {**{name: value for name, value in from_file.items() if name not in derived}, **typed}


def _global_batch(
    flags: Flags,
    config: UserConfig | None,
    held: Mapping[str, KnobValue],
    space: SearchSpace,
    devices: int,
    trainer: Trainer,
) -> int | None:
    """Return completions per optimizer step: flag, micro-batch and accumulation of flags,
    configuration or space.
    """
    given = positive("--global-batch", flags.global_batch)
    if given is not None:
        return given
    typed = held_by(flags, trainer.canonical)
    if not trainer.completions_each and (config is not None or _BATCH[1] in typed):
        return None  # it follows from what fills a micro-batch
    both_typed = all(name in typed for name in _BATCH)
    if config is None and not both_typed:
        assumed = space.assume.get("global_batch")
        return assumed if isinstance(assumed, int) else None
    if not all(name in trainer.fields() for name in _BATCH):
        return None  # it follows from the framework's own settings
    named = held if both_typed or config is None else config.settings
    micro, steps = (named.get(name, trainer.fields()[name].default) for name in _BATCH)
    if not isinstance(micro, int) or not isinstance(steps, int):
        return None
    settings: dict[str, Any] = {
        **{name: field.default for name, field in trainer.fields().items()},
        **held,
    }
    return micro * steps * trainer.ranks(settings, devices) * trainer.completions_each


def build_job(subject: str, flags: Flags, task: Task, space: SearchSpace, mode: Mode) -> Job:
    """Return the job. The study's default name consists of subject and hardware."""
    out = Path(flags.out).expanduser()
    return Job(
        task=task,
        space=space,
        memory_limit_bytes=memory_limit(flags, task.hardware),
        budget_seconds=DEFAULT_BUDGET_S if flags.budget == AUTO else parse_seconds(flags.budget),
        budget_adapts=flags.budget == AUTO,
        max_probes=positive("--max-probes", flags.max_probes) or 1,
        mode=mode,
        sampler=flags.sampler,
        storage=storage_url(flags.storage, flags.storage_file) or sqlite_url(out / "study.db"),
        study_name=flags.study or re.sub(r"[^\w.-]+", "-", f"{subject}-{task.hardware}"),
        out=out,
        resume=flags.resume,
        fresh=flags.fresh,
        executor=flags.executor,
        address=flags.address,
        slots=positive("--slots", flags.slots),
    )


def _refuse_illegal_config(job: Job, trainer: Trainer, from_file: Mapping[str, KnobValue]) -> None:
    """Refuse a configuration file that the framework rejects. Flags may repair the file, or depend
    on knobs that the search has yet to set: if the merged settings are illegal, only the file alone
    is judged, with the framework's defaults.
    """
    task = job.task
    if (
        task.workload.config_file is None
        or trainer.why_illegal(trainer.complete({}, task), task) is None
    ):
        return
    task = replace(task, workload=replace(task.workload, held=from_file))
    reason = trainer.why_illegal(trainer.complete({}, task), task)
    if reason is not None:
        raise IllegalConfiguration(
            f"{task.workload.config_file} can't be trained as it is: {reason}",
            way_out="Correct it and run again.",
        )


def _assumed(flags: Flags, config: UserConfig | None, job: Job, trainer: Trainer) -> Iterator[str]:
    workload, space = job.task.workload, job.space
    source = " (as the configuration has it)" if config else ""
    if flags.tuning is None:
        ranks = space["lora_r"].choices if workload.tuning != "full" and "lora_r" in space else ()
        rank = f" of rank {ranks[0]}" if len(ranks) == 1 and flags.lora_rank is None else ""
        yield (
            {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}[workload.tuning]
            + rank
            + source
        )
    if flags.global_batch is None and workload.global_batch is not None:
        yield f"global batch {workload.global_batch}{source}"
    if "dtype" in workload.defaults:
        yield (
            f"weights in {workload.defaults['dtype']} (TRL's default: the configuration names no"
            " dtype)"
        )
    if flags.weights == "random":
        yield "random weights"
    if (
        workload.dataset is None
        and "datasets" not in workload.user_settings
        and workload.script is None
    ):
        yield "synthetic prompts of the longest length"
    targets = trainer.complete(trainer.baseline(space, job.task), job.task).settings.get(
        "lora_target_modules"
    )
    if targets is not None and "lora_target_modules" not in {
        **workload.held,
        **workload.user_settings,
    }:
        yield f"adapter on {targets} layers"

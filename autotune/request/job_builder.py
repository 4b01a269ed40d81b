"""Values of the sources -> Job: looks up names, merges what is stated, and checks the result."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune import frameworks
from autotune.catalog import model_lookup, space_files
from autotune.catalog.assumed_shapes import model_named_by
from autotune.core.dataset import TokenLengths, refuse_unreadable
from autotune.core.errors import BadInput, CannotPredict, IllegalConfiguration
from autotune.core.files import sqlite_url
from autotune.core.job import Hardware, Job, Mode, Model, Task, Workload
from autotune.core.space import Candidate, KnobValue, SearchSpace
from autotune.frameworks import shares_in_files
from autotune.frameworks.base import ACCUMULATION, MICRO_BATCH, Trainer
from autotune.frameworks.script_gpus import ScriptGpus
from autotune.frameworks.trl.settings import OFFLINE
from autotune.machine import environment
from autotune.request.images import with_images
from autotune.request.notes import assumptions, difference_of_gpus, exported_note, job_notes
from autotune.request.origins import HeldSetting, HeldSettings, Origin, Source, values_of
from autotune.request.precedence import (
    ChosenTuning,
    choose_training,
    choose_tuning,
    held_settings,
    settings_of_file,
    settings_of_flags,
)
from autotune.request.resources import (
    check_packages,
    headroom,
    measuring_mode,
    memory_limit,
    target_hardware,
    without_engine,
)
from autotune.request.searched_space import accepted_settings, named_choices, space_around
from autotune.request.sources import length_sources
from autotune.request.sources.config_file import read_config_file
from autotune.request.sources.exported_variables import exported_allocator, sets_allocator
from autotune.request.sources.reader import SourceReader
from autotune.request.values import (
    FlagValues,
    LengthChoice,
    SettingChoice,
    UserFile,
)


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """Job with the assumptions and notes for the reader."""

    job: Job
    trainer: Trainer
    assumed: tuple[str, ...]  # defaults of the space that no flag states
    notes: tuple[str, ...]  # deviations from what one would expect
    # Knob values that flags name; each must be possible
    flag_choices: Mapping[str, tuple[KnobValue, ...]]
    whole_space: SearchSpace  # space before anything was held; advice may change all of it
    pinned: frozenset[str] = frozenset()  # settings of --hold, which are never relaxed
    held_settings: HeldSettings = field(default_factory=dict)  # of the job, with their origins
    searched: frozenset[str] = frozenset()  # knobs of --search

    def origin(self, name: str) -> Origin:
        """Return what decides the value of a setting, or the choices of a knob."""
        if name in self.searched:
            return Origin(source=Source.SEARCH, place="--search")
        if name in self.held_settings:
            return self.held_settings[name].origin
        if name in self.job.space:
            return Origin(source=Source.SPACE, place=self.job.space.name)
        return Origin(source=Source.FRAMEWORK, place=self.trainer.name)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Inputs of a request outside of its flags."""

    hardware: Hardware
    trainer: Trainer
    space: SearchSpace  # of --space, or of the trainer; with the knobs for these devices
    python: Path  # interpreter of the training environment
    file: UserFile | None
    exported: HeldSetting | None  # allocator settings of this shell; None: none that count


@dataclass(frozen=True, kw_only=True)
class MergedSettings:
    """Settings of all sources, merged by their precedence."""

    tuning: ChosenTuning
    defaults: Mapping[str, KnobValue]  # of the framework, with which the user's file trains
    of_file: HeldSettings  # of the user's file, with these defaults and the tuning
    of_flags: HeldSettings  # of flags and exported variables, under the framework's names
    held_settings: HeldSettings
    flag_choices: Mapping[str, tuple[KnobValue, ...]]  # knobs that flags hold or search


def _gpus_that_divide(trainer: Trainer, task: Task) -> Hardware | None:
    """Return the most GPUs below these on which the configuration is legal."""
    workload = replace(task.workload, global_batch=None)  # it follows their number
    for count in range(task.hardware.count - 1, 0, -1):
        hardware = replace(task.hardware, count=count)
        smaller_task = replace(task, workload=workload, hardware=hardware)
        if trainer.why_illegal(trainer.complete({}, smaller_task), smaller_task) is None:
            return hardware
    return None


class IllegalFile(IllegalConfiguration):
    """Refusal of the user's file on these GPUs. `fewer_gpus`: those that it is made for."""

    def __init__(
        self,
        sentence: str,
        *,
        way_out: str,
        fewer_gpus: Hardware | None,
    ) -> None:
        super().__init__(sentence, way_out=way_out)
        self.fewer_gpus = fewer_gpus


def build_request(flags: FlagValues, reader: SourceReader) -> ParsedRequest:
    """Build the job without measuring. BadInput and its subclasses contain the fix.

    A script that is made for fewer GPUs than there are, and can't train on all of them, is
    predicted on its own number.
    """
    try:
        return _build_request(flags, reader)
    except IllegalFile as error:
        if error.fewer_gpus is None or flags.hardware.mode != "predict":
            raise
        hardware = replace(flags.hardware, gpus=str(error.fewer_gpus))
        try:
            request = _build_request(replace(flags, hardware=hardware), reader)
        except IllegalFile:
            raise error from None
        line = f"training on {error.fewer_gpus} of the {flags.hardware.gpus}, as the script says"
        return replace(request, assumed=(line, *request.assumed))


def _build_request(flags: FlagValues, reader: SourceReader) -> ParsedRequest:
    if flags.model.offline:
        model_lookup.stay_offline()

    # 1. Sources, and the settings that they state together.
    sources = _read_sources(flags, reader)
    trainer = sources.trainer
    hardware = sources.hardware
    choice = _with_exported(flags.settings, sources.exported)
    model = _model(flags, sources.file)
    settings = _merge_settings(flags, choice, sources)
    space = _searched_space(choice, sources, settings)

    # 2. Training environment.
    mode = measuring_mode(flags.hardware, hardware, trainer)
    notes: list[str] = []
    has_vllm = check_packages(trainer, mode, sources.python, reader=reader)
    if mode != "predict" and not has_vllm:
        space, notes = without_engine(space, hardware)

    # 3. Job.
    workload = _workload(flags, sources, settings, space, model)
    workload, image_notes = with_images(flags.lengths, workload, hardware, trainer)
    subject = workload.model.name.rstrip("/").split("/")[-1]
    task = Task(workload=workload, hardware=hardware)
    job = build_job(f"{subject}-{workload.method}", flags, task, space, mode)

    # 4. Notes for the reader.
    config = None if sources.file is None else sources.file.config
    if sources.exported is not None:
        notes.append(exported_note(sources.exported))
    notes += [*image_notes, *job_notes(flags, job, trainer, config)]
    notes += _share_notes(sources, settings, job)
    of_script = tuple(_about_script(sources, settings))
    gpus_of_script = None if sources.file is None else sources.file.script_gpus
    _refuse_illegal_file(job, trainer, settings.of_file, of_script, gpus_of_script)
    assumed = assumptions(flags, job, trainer, config, settings.tuning)
    return ParsedRequest(
        job=job,
        trainer=trainer,
        assumed=(*of_script, *assumed),
        notes=tuple(notes),
        flag_choices=settings.flag_choices,
        whole_space=sources.space,
        pinned=frozenset(choice.hold),
        held_settings=settings.held_settings,
        searched=frozenset(choice.searched),
    )


def candidate_of_job(request: ParsedRequest) -> Candidate:
    """Return the candidate of `predict`: given values, else the framework's defaults."""
    job = request.job
    trainer = request.trainer
    candidate = trainer.complete(trainer.baseline(job.space, job.task), job.task)
    reason = trainer.why_illegal(candidate, job.task)
    if reason is not None:
        raise IllegalConfiguration(
            f"This can't be trained as it is: {reason}",
            way_out="Change it with --set, and run again.",
        )
    return candidate


# Sources.


def _read_sources(flags: FlagValues, reader: SourceReader) -> Sources:
    """Read the user's file and the space, which decide framework and method together."""
    training = flags.training
    choice = flags.file
    hardware = target_hardware(flags.hardware)
    python = environment.interpreter(training.python)

    # 1. A script names framework and method itself.
    file: UserFile | None = None
    is_predicted = flags.hardware.mode == "predict" or not hardware.here
    if choice is not None and choice.flag != "--config":
        from autotune.request.sources.scripts import read_script  # with parsers of shell and Python

        inspection = (python, hardware, training.method, is_predicted)
        file = read_script(choice, reader, flags.settings.stated_by_flags, inspection)

    # 2. The trainer, and its space.
    space = None if training.space is None else space_files.load_space(training.space)
    framework, method = choose_training(training, file, space)
    trainer = None if file is None else file.trainer
    if trainer is None:
        trainer = frameworks.trainer(framework, method)
    if space is None:
        space = space_files.load_space(trainer.space)
    space = space.on(hardware.count if hardware.kind == "cuda" else 0)

    # 3. A configuration file is read as one of this method.
    if choice is not None and choice.flag == "--config":
        _refuse_config_of_trl(trainer)
        file = reader.once(read_config_file, choice, method)
    return Sources(
        hardware=hardware,
        trainer=trainer,
        space=space,
        python=python,
        file=file,
        exported=None
        if sets_allocator(file)
        else _exported(flags.settings, space, trainer, hardware),
    )


def _refuse_config_of_trl(trainer: Trainer) -> None:
    if not trainer.reads_config:
        raise BadInput(
            f"--config reads TRL's files, not {trainer.name}'s.",
            way_out=(
                f"Give {trainer.name}'s settings one by one, under their own names: --set"
                f" {next(iter(trainer.fields()))}=..."
            ),
        )


def _exported(
    choice: SettingChoice,
    space: SearchSpace,
    trainer: Trainer,
    hardware: Hardware,
) -> HeldSetting | None:
    """Return the exported allocator settings, where they count.

    They count for GPUs of this machine, since another shell starts a run elsewhere, and unless a
    flag names them.
    """
    setting = exported_allocator()
    if setting is None or hardware.kind != "cuda" or not hardware.here:
        return None
    is_known = setting.name in space or setting.name in accepted_settings(trainer)
    return setting if is_known and not choice.names(setting.name) else None


def _with_exported(choice: SettingChoice, exported: HeldSetting | None) -> SettingChoice:
    if exported is None:
        return choice
    return replace(choice, hold={**choice.hold, exported.name: exported})


def _model(flags: FlagValues, file: UserFile | None) -> Model:
    if file is not None and file.made_model is not None:
        return file.made_model
    name = flags.model.name or (None if file is None else file.model)
    hinted = _hinted_model(flags, file)
    if name is None and hinted is not None:
        return hinted
    if name is None:
        reason = "" if file is None else file.why_no_model
        raise BadInput(
            reason or "No model was named.",
            way_out="Type --model Qwen2.5-7B, or --model FOLDER with a config.json.",
        )
    try:
        model = model_lookup.find_model(name, is_of_script=flags.model.name is None)
    except BadInput as error:
        if hinted is not None:
            return hinted
        if file is None or flags.model.name or not file.why_no_model:
            raise
        raise BadInput(f"{file.why_no_model} {error.what}", way_out=error.way_out) from error
    if flags.model.weights == "real" and not model_lookup.has_weights(model.folder):
        raise BadInput(
            f"--weights real needs the weights of {model.name} on this machine, and only its shape"
            " is here.",
            way_out=(
                f"Fetch them with `hf download {model.name}`, or leave --weights out: memory and"
                " speed are the same."
            ),
        )
    return model


def _hinted_model(flags: FlagValues, file: UserFile | None) -> Model | None:
    """Return the shape that the file speaks of elsewhere, as in the name of its run."""
    if file is None or flags.model.name is not None:
        return None
    return model_named_by(file.model_hints)


# Merged settings, and the space around them.


def _merge_settings(
    flags: FlagValues,
    choice: SettingChoice,
    sources: Sources,
) -> MergedSettings:
    trainer = sources.trainer
    space = sources.space
    file = sources.file
    tuning = choose_tuning(flags, file, space)
    flag_choices = named_choices(choice, space, tuning.tuning, trainer)

    defaults: Mapping[str, KnobValue] = {}
    if file is not None and file.script is None:
        config = file.config
        defaults = trainer.trained_defaults(config.settings, config.rest, space, sources.python)
    of_file = settings_of_file(file, defaults, tuning)
    if file is not None:
        of_file = _with_shares_of_limit(of_file, flags, sources)
    of_flags = settings_of_flags(choice, trainer.canonical)
    return MergedSettings(
        tuning=tuning,
        defaults=defaults,
        of_file=of_file,
        of_flags=of_flags,
        held_settings=held_settings(
            of_file, of_flags, frozenset() if file is None else file.unread
        ),
        flag_choices=flag_choices,
    )


def _with_shares_of_limit(
    of_file: HeldSettings,
    flags: FlagValues,
    sources: Sources,
) -> HeldSettings:
    """Return the file's settings with engine shares of the limit: in a file they are of the GPU."""
    trainer = sources.trainer
    hardware = sources.hardware
    scale = shares_in_files.scale_of(hardware, memory_limit(flags.hardware.memory_limit, hardware))
    converted = shares_in_files.within_limit(values_of(of_file), scale, trainer.fields())
    default = Origin(source=Source.FRAMEWORK, place=trainer.name)
    settings = {}
    for name, value in converted.items():
        origin = of_file[name].origin if name in of_file else default
        settings[name] = HeldSetting(
            name=name,
            value=value,
            origin=origin,
        )
    return settings


def _about_script(sources: Sources, settings: MergedSettings) -> Iterator[str]:
    """Yield how the answer differs from a launch script as it would run."""
    if sources.file is not None:
        trainer = sources.trainer
        completed = _completed(trainer, values_of(settings.held_settings))
        ranks = trainer.ranks(completed, sources.hardware.count)
        script_gpus = sources.file.script_gpus
        yield from difference_of_gpus(script_gpus, ranks, trainer)
        yield from sources.file.config.assumed


def _completed(trainer: Trainer, settings: Mapping[str, KnobValue]) -> dict[str, Any]:
    """Return the settings with the framework's defaults below them."""
    completed: dict[str, Any] = {}
    setting_fields = trainer.fields()
    for name, field_ in setting_fields.items():
        completed[name] = field_.default
    return completed | dict(settings)


def _share_notes(
    sources: Sources,
    settings: MergedSettings,
    job: Job,
) -> list[str]:
    """Return what the user's file states of engine shares that no flag overrides."""
    if sources.file is None:
        return []
    unchanged = {}
    file_settings = sources.file.config.settings
    for name, value in file_settings.items():
        if name not in settings.of_flags:
            unchanged[name] = value
    held_values = values_of(settings.held_settings)
    notes = shares_in_files.file_notes(
        unchanged, held_values, sources.hardware, job.memory_limit_bytes
    )
    return list(notes)


def _searched_space(
    choice: SettingChoice,
    sources: Sources,
    settings: MergedSettings,
) -> SearchSpace:
    stated = set(settings.held_settings)
    if choice.global_batch is not None:
        stated.add("global_batch")
    held_values = values_of(settings.held_settings)
    return space_around(
        sources.space,
        sources.trainer,
        held_values,
        stated,
        settings.flag_choices,
    )


# Workload and job.


def _workload(
    flags: FlagValues,
    sources: Sources,
    settings: MergedSettings,
    space: SearchSpace,
    model: Model,
) -> Workload:
    file = sources.file
    trainer = sources.trainer
    held_values = values_of(settings.held_settings)
    lengths = _completion_lengths(flags.lengths, trainer.method)
    typical = flags.lengths.typical_completion
    if typical is None and lengths is not None:
        typical = max(1, round(lengths.mean))
    global_batch = _global_batch(flags.settings, sources, settings, space)
    workload = Workload(
        model=model,
        method=trainer.method,
        framework=trainer.name,
        python=sources.python,
        tuning=settings.tuning.tuning,
        weights=flags.model.weights,
        global_batch=global_batch,
        typical_completion_length=typical,
        completion_lengths=lengths,
        prompt_lengths=_prompt_lengths(flags.lengths),
        dataset=flags.model.dataset,
        held_values=held_values,
        trust_remote_code=bool(held_values.get("trust_remote_code", False)),
        seed=flags.search.seed,
    )
    if file is not None:
        workload = _with_file(workload, file, settings)
    # A prediction needs no rows: the longest ones are assumed.
    if workload.dataset is not None and (flags.model.dataset or sources.hardware.here):
        refuse_unreadable(workload.dataset)
    return workload


def _with_file(
    workload: Workload,
    file: UserFile,
    settings: MergedSettings,
) -> Workload:
    """Return the workload with what the user's file states."""
    config = file.config
    unstated: dict[str, KnobValue] = {}
    for name, value in settings.defaults.items():
        is_held = name in workload.held_values and workload.held_values[name] == value
        if is_held and name not in settings.tuning.settings:
            unstated[name] = value
    return replace(
        workload,
        weights=file.weights or workload.weights,
        dataset=workload.dataset or config.dataset,
        config_file=config.path,
        user_settings=dict(config.rest),
        stated={**config.settings, **config.rest, **config.moved},
        defaults=unstated,
        launch=file.launch,
        script=file.script,
    )


def _completion_lengths(choice: LengthChoice, method: str) -> TokenLengths | None:
    if choice.completions is None:
        return None
    if method in OFFLINE:
        raise BadInput(
            f"--lengths {choice.completions}: {method} trains on given rows and generates no"
            " completions.",
            way_out="Leave it out; --dataset states the lengths of your rows.",
        )
    return length_sources.read(choice.completions)


def _prompt_lengths(choice: LengthChoice) -> TokenLengths | None:
    if choice.prompts is None:
        return None
    if choice.completions is None:
        raise BadInput(
            f"--prompt-lengths {choice.prompts}: without --lengths they change nothing.",
            way_out="Give --lengths, the completions that occur, as well.",
        )
    return length_sources.read_prompts(choice.prompts)


def _global_batch(
    choice: SettingChoice,
    sources: Sources,
    settings: MergedSettings,
    space: SearchSpace,
) -> int | None:
    """Return completions per optimizer step: by flag, by micro-batch and accumulation of flags or
    file, or as the space assumes. None: they follow from the framework's own settings.
    """
    if choice.global_batch is not None:
        return choice.global_batch
    trainer = sources.trainer
    file = sources.file

    # 1. The settings that make the batch.
    has_own_parts = MICRO_BATCH in settings.of_flags and ACCUMULATION in settings.of_flags
    if not trainer.completions_each and (file is not None or ACCUMULATION in settings.of_flags):
        return None  # it follows from what fills a micro-batch
    if file is None and not has_own_parts:
        assumed = space.assume.get("global_batch")
        return assumed if isinstance(assumed, int) else None
    defaults = {name: setting.default for name, setting in trainer.fields().items()}
    if MICRO_BATCH not in defaults or ACCUMULATION not in defaults:
        return None

    # 2. Their product.
    held_values = values_of(settings.held_settings)
    stated: Mapping[str, KnobValue] = held_values
    if file is not None and not has_own_parts and MICRO_BATCH not in file.unread:
        stated = file.config.settings
    micro_batch = stated.get(MICRO_BATCH, defaults[MICRO_BATCH])
    accumulation = stated.get(ACCUMULATION, defaults[ACCUMULATION])
    completed = _completed(trainer, held_values)
    if accumulation is None:
        of_file = {**completed, MICRO_BATCH: micro_batch}
        accumulation = trainer.default_accumulation(of_file, sources.hardware.count)
    if not isinstance(micro_batch, int) or not isinstance(accumulation, int):
        return None
    ranks = trainer.ranks(completed, sources.hardware.count)
    return micro_batch * accumulation * ranks * trainer.completions_each


def build_job(
    subject: str,
    flags: FlagValues,
    task: Task,
    space: SearchSpace,
    mode: Mode,
) -> Job:
    """Return the job. The study's default name consists of subject and hardware."""
    search = flags.search
    hardware = flags.hardware
    limit_bytes = memory_limit(hardware.memory_limit, task.hardware)
    return Job(
        task=task,
        space=space,
        memory_limit_bytes=limit_bytes,
        headroom=headroom(hardware.headroom, limit_bytes),
        budget_seconds=search.budget_seconds,
        budget_adapts=search.budget_adapts,
        max_probes=search.max_probes,
        mode=mode,
        sampler=search.sampler,
        storage=search.storage or sqlite_url(search.out / "study.db"),
        study_name=search.study or re.sub(r"[^\w.-]+", "-", f"{subject}-{task.hardware}"),
        out=search.out,
        resume=search.resume,
        fresh=search.fresh,
        executor=hardware.executor,
        address=hardware.address,
        slots=hardware.slots,
    )


def _refuse_illegal_file(
    job: Job,
    trainer: Trainer,
    of_file: HeldSettings,
    of_script: tuple[str, ...],
    gpus_of_script: ScriptGpus | None,
) -> None:
    """Refuse a user's file that the framework rejects. Flags may repair the file, or depend on
    knobs that the search has yet to set: if the merged settings are illegal, only the file alone
    is judged, with the framework's defaults.
    """
    task = job.task
    if task.workload.config_file is None:
        return
    candidate = trainer.complete({}, task)
    reason = trainer.why_illegal(candidate, task)
    if reason is None:
        return
    workload = replace(task.workload, held_values=values_of(of_file))
    file_task = replace(task, workload=workload)
    with contextlib.suppress(CannotPredict):  # flags replace what is not modelled
        candidate = trainer.complete({}, file_task)
        reason = trainer.why_illegal(candidate, file_task)
    if reason is not None:
        differences = ""
        for line in of_script:
            setting, equals, _ = line.partition("=")
            if not equals or " " in setting or setting in reason:
                differences += f" {line}."
        way_out = "Correct it, or change it with --set, and run again."
        fewer_gpus = None
        if gpus_of_script is not None and gpus_of_script.count != task.hardware.count:
            gpus = replace(task.hardware, count=gpus_of_script.count)
            way_out = f"Give the GPUs that it is made for, --gpus {gpus}, or change it with --set."
            fewer_gpus = gpus if gpus.count < task.hardware.count else None
        elif "divisible" in reason:
            dividing = _gpus_that_divide(trainer, file_task)
            if dividing is not None:
                way_out = f"Give GPUs that divide it, --gpus {dividing}, or change it with --set."
        raise IllegalFile(
            f"{task.workload.config_file} can't be trained as it is: {reason}{differences}",
            way_out=way_out,
            fewer_gpus=fewer_gpus,
        )

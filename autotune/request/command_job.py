"""`--framework command`: a job from a command line with placeholders."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from autotune.core.errors import BadInput, HardwareNotHere, TrainingEnvironmentError
from autotune.core.job import Model, Task, Workload
from autotune.core.space import Knob, KnobValue, SearchSpace
from autotune.frameworks.command import METHOD, NAME, Command, placeholders
from autotune.machine import environment, hardware_detection
from autotune.probe.device_report import gpu_notes
from autotune.request.assignments import parse_holds, parse_searches
from autotune.request.flags import Flags, option_name
from autotune.request.job_builder import ParsedRequest, build_job, refuse_resume_and_fresh

EXAMPLE = (
    "autotune run --framework command --metrics metrics.jsonl --search batch=1,2,4 -- torchrun"
    " train.py --bs {batch}"
)
PATTERN = "'(?P<tokens_per_second>[0-9.]+) tok/s'"

FRAMEWORK_FLAGS = (
    "model",
    "dataset",
    "config",
    "tuning",
    "lora_rank",
    "max_prompt_length",
    "max_completion_length",
    "typical_completion_length",
    "image_size",
    "images_per_sample",
    "lengths",
    "prompt_lengths",
    "num_generations",
    "global_batch",
    "space",
)
"""Flags for known frameworks; a command contains these values itself."""

GROUPS = ("tokens_per_second", "tokens", "tokens_so_far", "seconds")


def parse_command_request(flags: Flags) -> ParsedRequest:
    """Build the job without running the command."""
    _refuse_contradictions(flags)
    hardware = hardware_detection.hardware(flags.gpus)
    if not hardware.here or not hardware_detection.can_be_probed(hardware):
        raise HardwareNotHere(
            f"{hardware} can't be measured on this machine, and a command of your own can't be"
            " predicted.",
            way_out="Run this where the GPUs are, or leave --gpus out.",
        )
    python, program = environment.interpreter(flags.python), flags.arguments[0]
    if shutil.which(program) is None and not (
        flags.python and shutil.which(program, path=str(python.parent))
    ):
        raise TrainingEnvironmentError(
            f"The command begins with {program!r}, which is no program here. Give its path, or with"
            " --python the interpreter of the environment that has it."
        )
    held, searched = parse_holds(flags.hold), parse_searches(flags.search)
    space = _space(flags, held, searched)
    # The script's name, or else the program's.
    name = Path(
        next(
            (word for word in flags.arguments if word.endswith((".py", ".sh"))), flags.arguments[0]
        )
    ).name
    workload = Workload(
        model=Model(name=name, config={}, folder=None, origin="your own command"),
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
    job = build_job(name, flags, Task(workload=workload, hardware=hardware), space, "probe")
    neutral = [
        knob.name for knob in space.knobs if knob.effect == "neutral" and len(knob.choices) > 1
    ]
    words = " and ".join(f"{{{name}}}" for name in neutral) + (
        " change" if len(neutral) > 1 else " changes"
    )
    return ParsedRequest(
        job=job,
        trainer=Command(),
        notes=tuple(gpu_notes(hardware, job.memory_limit_bytes)),
        assumed=(
            (f"that {words} only speed and memory (--learning NAME otherwise)",) if neutral else ()
        ),
        named=searched,
        whole_space=space,
        pinned=frozenset(held),
    )


def _refuse_contradictions(flags: Flags) -> None:
    if flags.mode == "emulate":
        raise BadInput(
            "The speed of a command of your own can't be predicted, so it is not searched on"
            " emulated GPUs.",
            way_out="`autotune rehearse` runs it once on them, with its peaks.",
        )
    if flags.mode == "predict":
        raise BadInput(
            "A command of your own can be measured, and not predicted.",
            way_out=f"Where its GPUs are: {EXAMPLE}",
        )
    if not flags.arguments:
        raise BadInput(
            "--framework command needs a command.", way_out=f"Write it behind two dashes: {EXAMPLE}"
        )
    for name in FRAMEWORK_FLAGS:
        if getattr(flags, name) is not None:
            raise BadInput(
                f"{option_name(name)} is for known frameworks.",
                way_out="Write the value into the command itself.",
            )
    refuse_resume_and_fresh(flags)
    if (flags.metrics is None) == (flags.speed_pattern is None):
        raise BadInput(
            "The source of the command's speed must be given once.",
            way_out=(
                "--metrics FILE: JSON lines with tokens_per_second, or tokens and seconds. "
                f"--speed-pattern REGEX: printed lines, like {PATTERN}."
            ),
        )
    if (pattern := flags.speed_pattern) is None:
        return
    try:
        groups = set(re.compile(pattern).groupindex)
    except re.error as error:
        raise BadInput(
            f"--speed-pattern {pattern!r}: not a regular expression ({error}).",
            way_out=f"Example: {PATTERN}",
        ) from error
    if not groups & {"tokens_per_second", "tokens", "tokens_so_far"}:
        raise BadInput(
            f"--speed-pattern {pattern!r} has no group that names a speed.",
            way_out=f"Name its groups among {', '.join(GROUPS)}. Example: {PATTERN}",
        )


def _space(
    flags: Flags, held: dict[str, KnobValue], searched: dict[str, tuple[KnobValue, ...]]
) -> SearchSpace:
    """Build a space with one knob per placeholder and the typed values."""
    names = placeholders(flags.arguments)
    for name in (*held, *searched, *flags.learning):
        if name not in names:
            there = ", ".join(f"{{{one}}}" for one in names) or "none"
            raise BadInput(
                f"{name!r} is no placeholder of the command: it has {there}.",
                way_out=f"Write {{{name}}} where its value goes, like `--{name} {{{name}}}`.",
            )
    for name in names:
        if name not in held and name not in searched:
            raise BadInput(
                f"{{{name}}} has no values.",
                way_out=f"Give them: --search {name}=1,2,4, or --hold {name}=1.",
            )
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
        name=NAME,
        about="what was typed",
        method=METHOD,
        framework=NAME,
        knobs=knobs,
        objective="preference",
        relax=relax,
    )

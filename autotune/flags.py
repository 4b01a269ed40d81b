"""What was typed, read: the question's flags, and which knobs and settings they name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autotune import assignments
from autotune.candidate import KnobValue
from autotune.errors import BadInput
from autotune.question import Mode, SamplerName
from autotune.space import SearchSpace
from autotune.workload import Tuning, Weights


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The question's flags, as typed; None where a flag was not given. `run` and `predict` take the same."""

    model: str | None = None
    gpus: str = "local"
    method: str = "grpo"
    framework: str = "trl"
    python: str | None = None
    tuning: Tuning | None = None
    lora_rank: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    typical_completion_length: int | None = None
    num_generations: int | None = None
    global_batch: int | None = None
    dataset: str | None = None
    config: str | None = None
    hold: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    """`predict` alone: what the one candidate in question has."""

    search: tuple[str, ...] = ()
    memory_limit: str | None = None
    weights: Weights = "random"
    seed: int = 42
    space: str | None = None
    """None is the space that goes with the method."""

    budget: str = "20m"
    max_probes: int = 100
    mode: Mode = "auto"
    sampler: SamplerName = "value"
    storage: str | None = None
    study: str | None = None
    resume: bool = False
    fresh: bool = False
    out: str = "autotune-out"


def held_by(flags: Flags) -> dict[str, KnobValue]:
    """Everything that a flag pins to a value."""
    return {**_holds(flags), **_length_flags(flags)}


def _holds(flags: Flags) -> dict[str, KnobValue]:
    """--hold, and --set, which outranks it."""
    return {**assignments.parse_holds(flags.hold), **assignments.parse_holds(flags.set, flag="--set")}


def _length_flags(flags: Flags) -> dict[str, KnobValue]:
    given = {
        "max_prompt_length": positive("--max-prompt-length", flags.max_prompt_length),
        "max_completion_length": positive("--max-completion-length", flags.max_completion_length),
        "num_generations": positive("--num-generations", flags.num_generations),
        "lora_r": positive("--lora-rank", flags.lora_rank),
    }
    return {name: value for name, value in given.items() if value is not None}


def named_choices(
    flags: Flags, space: SearchSpace, tuning: Tuning, settings: Collection[str]
) -> dict[str, tuple[KnobValue, ...]]:
    """The knobs whose values were given one by one, by a flag of their own, --hold or --search.

    What is held may also be one of the framework's other `settings`.
    """
    holds, searches, lengths = _holds(flags), assignments.parse_searches(flags.search), _length_flags(flags)
    for name in {*holds, *lengths} & set(searches) | set(holds) & set(lengths):
        raise BadInput(
            f"{name} is both held and given another way.", way_out="Give it once: held with --hold, or moving with --search."
        )
    if flags.lora_rank is not None and tuning == "full":
        raise BadInput(
            "--lora-rank says LoRA, and full tuning has no adapter.", way_out="Type --tuning lora, or leave --lora-rank out."
        )
    assignments.check_names(holds, space, settings)
    assignments.check_names(searches, space)
    choices = {name: (value,) for name, value in {**holds, **lengths}.items() if name in space} | searches
    assignments.check_values(space, choices)
    return choices


def positive(flag: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise BadInput(f"{flag} {value} is not above zero.", way_out=f"Give {flag} a whole number of at least 1.")
    return value

"""What was typed, read: the question's flags, and which knobs and settings they name."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from autotune import assignments
from autotune.candidate import KnobValue
from autotune.errors import BadInput
from autotune.own_script import Rewards
from autotune.question import ExecutorName, Mode, SamplerName
from autotune.space import SearchSpace
from autotune.workload import Tuning, Weights

Words = Mapping[str, str]
"""A trainer's `canonical`: what autotune's own flags hold -> the framework's name of it."""

MOST_WAYS = 16
"""In which what is unknown may be: each is predicted."""


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

    unknown: tuple[str, ...] = ()
    """`predict` alone: what is not known of it, with the values between which it lies."""

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
    executor: ExecutorName = "local"
    address: str | None = None
    slots: int | None = None
    script: str | None = None
    """The user's own training script: the baseline, as a configuration file is."""

    rewards: Rewards = "real"
    arguments: tuple[str, ...] = ()
    """What follows two dashes: a command line with its placeholders (`--framework command`), or what `--script` is given."""

    metrics: str | None = None
    speed_pattern: str | None = None
    learning: tuple[str, ...] = ()
    """Placeholders of it that change what is learned."""


def held_by(flags: Flags, words: Words) -> dict[str, KnobValue]:
    """Everything that a flag pins to a value, by the framework's `words` for autotune's own."""
    return {**_holds(flags), **{words.get(name, name): value for name, value in _length_flags(flags).items()}}


def ways_of(flags: Flags) -> tuple[tuple[Mapping[str, KnobValue], Flags], ...]:
    """Every way in which what is not known can be, each with the flags that say so; one where nothing is unknown."""
    unknown = assignments.parse_searches(flags.unknown, flag="--unknown")
    given = {**_holds(flags), **_length_flags(flags)}
    for name in set(unknown) & set(given):
        raise BadInput(f"{name} is both given and unknown.", way_out=f"Give {name} once.")
    ways = math.prod(len(values) for values in unknown.values())
    if ways > MOST_WAYS:
        raise BadInput(
            f"What is unknown can be in {ways} ways, and {MOST_WAYS} are the most that are looked at.",
            way_out="Give the least and the largest value of each alone.",
        )
    known = dataclasses.replace(flags, unknown=())
    return tuple(
        (dict(zip(unknown, values, strict=True)), _with(known, zip(unknown, values, strict=True)))
        for values in itertools.product(*unknown.values())
    )


def _with(flags: Flags, chosen: Iterable[tuple[str, KnobValue]]) -> Flags:
    return dataclasses.replace(flags, set=(*flags.set, *(f"{name}={json.dumps(value)}" for name, value in chosen)))


def _holds(flags: Flags) -> dict[str, KnobValue]:
    """--hold, and --set, which outranks it."""
    return {**assignments.parse_holds(flags.hold), **assignments.parse_holds(flags.set, flag="--set")}


def _worded(flags: Flags, space: SearchSpace, words: Words) -> dict[str, KnobValue]:
    """Autotune's own flags in the framework's words; one that says nothing to it is refused, not dropped."""
    given = _length_flags(flags)
    for name in given:
        if name not in words:
            raise BadInput(
                f"{_FLAG_OF.get(name, name)} says nothing to {space.method} with {space.framework}.",
                way_out=f"Leave it out, and --hold one of `autotune show knobs --space {space.name}`.",
            )
    return {words[name]: value for name, value in given.items()}


_FLAG_OF = {
    "max_prompt_length": "--max-prompt-length", "max_completion_length": "--max-completion-length",
    "num_generations": "--num-generations", "lora_r": "--lora-rank",
}  # fmt: skip


def _length_flags(flags: Flags) -> dict[str, KnobValue]:
    given = {
        "max_prompt_length": positive("--max-prompt-length", flags.max_prompt_length),
        "max_completion_length": positive("--max-completion-length", flags.max_completion_length),
        "num_generations": positive("--num-generations", flags.num_generations),
        "lora_r": positive("--lora-rank", flags.lora_rank),
    }
    return {name: value for name, value in given.items() if value is not None}


def named_choices(
    flags: Flags, space: SearchSpace, tuning: Tuning, settings: Collection[str], words: Words
) -> dict[str, tuple[KnobValue, ...]]:
    """The knobs whose values were given one by one, by a flag of their own, --hold or --search.

    What is held may also be one of the framework's other `settings`; `words` are what it calls autotune's own flags.
    """
    holds, searches, lengths = _holds(flags), assignments.parse_searches(flags.search), _worded(flags, space, words)
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

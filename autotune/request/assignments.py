"""Knob values from --hold, --search, --unknown, --set and flags with a knob of their own."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence

from autotune.core.errors import BadInput, UnknownName
from autotune.core.job import Hardware, Tuning
from autotune.core.space import Knob, KnobValue, SearchSpace, setting_text
from autotune.core.yaml_document import read_scalar
from autotune.frameworks.trl.settings import ALLOCATOR_VARIABLE, NEWER_ALLOCATOR_VARIABLE
from autotune.request.flags import Flags, option_name

Words = Mapping[
    str, str
]  # a trainer's `canonical`: setting of an autotune flag -> the framework's name
MAX_VARIANTS = 16  # combinations of unknown values; each is predicted
FLAG_OF_SETTING = {
    "max_prompt_length": "max_prompt_length",
    "max_completion_length": "max_completion_length",
    "num_generations": "num_generations",
    "lora_r": "lora_rank",
}
"""Setting -> flag that holds it."""


def parse_holds(texts: Iterable[str], *, flag: str = "--hold") -> dict[str, KnobValue]:
    """Parse `["num_generations=8"]`. A name given twice is an error."""
    held: dict[str, KnobValue] = {}
    for text in texts:
        name, value = _split(text, flag, "K=V")
        if name in held:
            raise BadInput(f"{flag} {name} is given twice.", way_out="Keep one of the two.")
        held[name] = parse_value(value)
    return held


def parse_searches(
    texts: Iterable[str], *, flag: str = "--search"
) -> dict[str, tuple[KnobValue, ...]]:
    """Parse `["num_generations=4,8"]`."""
    searched: dict[str, tuple[KnobValue, ...]] = {}
    for text in texts:
        name, values = _split(text, flag, "K=V1,V2")
        if name in searched:
            raise BadInput(
                f"{flag} {name} is given twice.",
                way_out=f"Give all values at once: {flag} {name}=V1,V2.",
            )
        parts = [part for part in values.split(",") if part.strip()]
        if not parts:
            raise BadInput(
                f"{flag} {name} was given no value.",
                way_out=f"Give at least one: {flag} {name}=V1,V2.",
            )
        searched[name] = tuple(dict.fromkeys(parse_value(part) for part in parts))
    return searched


def parse_value(text: str) -> KnobValue:
    """Parse a value like YAML, so that flags and files agree; `1e-6` is a number, as in TRL."""
    value = read_scalar(text)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value.strip()
    return value if value is None or isinstance(value, bool | int | float) else text.strip()


def check_names(names: Iterable[str], space: SearchSpace, settings: Collection[str] = ()) -> None:
    """Raise UnknownName for names outside the space and the framework's `settings`."""
    known = [knob.name for knob in space.knobs]
    for name in names:
        if name not in space and name not in settings:
            raise UnknownName(
                "knob",
                name,
                [*known, *settings],
                listing=f"autotune show knobs --space {space.name}",
            )


def check_values(space: SearchSpace, choices: Mapping[str, Sequence[KnobValue]]) -> None:
    """Raise BadInput for values of another type; values outside the choices are allowed."""
    for name, values in choices.items():
        knob = space[name]
        examples = [choice for choice in knob.choices if choice is not None]
        for value in values:
            if not _fits_kind(knob, examples, value):
                kinds = {bool: "true or false", int: "a whole number", float: "a number"}
                *words, last = [setting_text(choice) for choice in examples]
                like = f"{', '.join(words)} or {last}" if words else last
                way_out = f"It takes {kinds.get(type(examples[0]), 'a name')}, like {like}."
                raise BadInput(f"{name} can't be {value!r:.80}.", way_out=way_out)


def held_by(flags: Flags, words: Words) -> dict[str, KnobValue]:
    """Return all settings that flags hold, under the framework's names."""
    return {
        **_holds(flags),
        **{words.get(name, name): value for name, value in _knob_flags(flags).items()},
    }


def ways_of(flags: Flags) -> tuple[tuple[Mapping[str, KnobValue], Flags], ...]:
    """Return each combination of unknown values with its flags; a single one without --unknown."""
    unknown = parse_searches(flags.unknown, flag="--unknown")
    given = {**_holds(flags), **_knob_flags(flags)}
    for name in set(unknown) & set(given):
        raise BadInput(f"{name} is both given and unknown.", way_out=f"Give {name} once.")
    count = math.prod(len(values) for values in unknown.values())
    if count > MAX_VARIANTS:
        raise BadInput(
            f"The unknown values combine in {count} ways; at most {MAX_VARIANTS} are predicted.",
            way_out="Give only the smallest and the largest value of each.",
        )
    variants = [
        dict(zip(unknown, values, strict=True)) for values in itertools.product(*unknown.values())
    ]
    return tuple(
        (
            facts,
            flags.replace(
                unknown=(),
                set=(*flags.set, *(f"{name}={json.dumps(value)}" for name, value in facts.items())),
            ),
        )
        for facts in variants
    )


def named_choices(
    flags: Flags, space: SearchSpace, tuning: Tuning, settings: Collection[str], words: Words
) -> dict[str, tuple[KnobValue, ...]]:
    """Return the choices of all knobs that flags name: by a flag of their own, --hold or
    --search. --hold may also name one of the framework's `settings`.
    """
    holds, searches, own = _holds(flags), parse_searches(flags.search), {}
    for name, value in _knob_flags(flags).items():
        if name not in words:
            raise BadInput(
                f"{option_name(FLAG_OF_SETTING[name])} does not apply to {space.method} with"
                f" {space.framework}.",
                way_out=(
                    f"Leave it out, and --hold one of `autotune show knobs --space {space.name}`."
                ),
            )
        own[words[name]] = value
    for name in {*holds, *own} & set(searches) | set(holds) & set(own):
        raise BadInput(
            f"{name} is both held and given another way.",
            way_out="Give it once: held with --hold, or moving with --search.",
        )
    if flags.lora_rank is not None and tuning == "full":
        raise BadInput(
            "--lora-rank needs an adapter, and full tuning has none.",
            way_out="Type --tuning lora, or leave --lora-rank out.",
        )
    check_names(holds, space, settings)
    check_names(searches, space)
    choices = {
        name: (value,) for name, value in {**holds, **own}.items() if name in space
    } | searches
    check_values(space, choices)
    return choices


def positive(flag: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise BadInput(
            f"{flag} {value} is not above zero.",
            way_out=f"Give {flag} a whole number of at least 1.",
        )
    return value


def _holds(flags: Flags) -> dict[str, KnobValue]:
    """Return --hold, overridden by --set."""
    return {**parse_holds(flags.hold), **parse_holds(flags.set, flag="--set")}


def _knob_flags(flags: Flags) -> dict[str, KnobValue]:
    given = {
        name: positive(option_name(flag), getattr(flags, flag))
        for name, flag in FLAG_OF_SETTING.items()
    }
    return {name: value for name, value in given.items() if value is not None}


def _split(text: str, flag: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise BadInput(
            f"{flag} {text!r} is not of the form {form}.",
            way_out=f"Write it like {flag} num_generations=8.",
        )
    return name.strip(), value


def _fits_kind(knob: Knob, examples: Sequence[KnobValue], value: KnobValue) -> bool:
    if not examples or value is None:
        return None in knob.choices or value is not None
    if any(isinstance(example, bool) for example in examples):
        return isinstance(value, bool)
    numbers = int if all(isinstance(example, int) for example in examples) else (int, float)
    if all(isinstance(example, int | float) for example in examples):
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, str)


def with_exported(
    flags: Flags,
    space: SearchSpace,
    settings: Collection[str],
    hardware: Hardware,
    ours: Mapping[str, str] = os.environ,
) -> tuple[Flags, list[str]]:
    """Return the flags with the exported allocator settings held, and a note; flags that name
    them win. Only for GPUs of this machine: elsewhere another shell starts the run.
    """
    value = ours.get(NEWER_ALLOCATOR_VARIABLE) or ours.get(ALLOCATOR_VARIABLE)
    known = ALLOCATOR_VARIABLE in space or ALLOCATOR_VARIABLE in settings
    named = any(
        text.partition("=")[0].strip() == ALLOCATOR_VARIABLE
        for text in (*flags.hold, *flags.search, *flags.set, *flags.unknown)
    )
    if not value or not known or named or hardware.kind != "cuda" or not hardware.here:
        return flags, []
    note = f"{ALLOCATOR_VARIABLE}={value} is exported here, and so held: --hold {ALLOCATOR_VARIABLE}=null leaves it out"
    return flags.replace(hold=(*flags.hold, f"{ALLOCATOR_VARIABLE}={value}")), [note]

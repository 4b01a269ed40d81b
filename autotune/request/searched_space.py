"""Search space of a request: the values that flags name, around the user's own configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from autotune.core.errors import BadInput
from autotune.core.job import Tuning
from autotune.core.space import Knob, KnobValue, SearchSpace, is_number
from autotune.frameworks.base import Trainer
from autotune.request.assignments import check_names, check_values
from autotune.request.origins import values_of
from autotune.request.values import SettingChoice

KnobChoices = Mapping[str, tuple[KnobValue, ...]]


def accepted_settings(trainer: Trainer) -> list[str]:
    """Return the settings that --hold and --set accept besides the space's knobs."""
    names = set(trainer.own_settings)
    for name, field in trainer.fields().items():
        if field.owner in ("config", "model"):
            names.add(name)
    names.discard("model_name_or_path")
    return sorted(names)


def named_choices(
    choice: SettingChoice,
    space: SearchSpace,
    tuning: Tuning,
    trainer: Trainer,
) -> dict[str, tuple[KnobValue, ...]]:
    """Return the choices of all knobs that flags name: with a flag of their own, --hold, --set or
    --search. BadInput: a name that is not known, that is given twice, or a value of another type.
    """
    flag_settings = {**choice.hold, **choice.set}
    assigned = values_of(flag_settings)
    by_flag: dict[str, KnobValue] = {}
    for name, setting in choice.own.items():
        if name not in trainer.canonical:
            raise BadInput(
                f"{setting.origin} does not apply to {space.method} with {space.framework}.",
                way_out=(
                    f"Leave it out, and --hold one of `autotune show knobs --space {space.name}`."
                ),
            )
        by_flag[trainer.canonical[name]] = setting.value

    # 1. Each setting is given once.
    twice = assigned.keys() & by_flag.keys()
    twice |= (assigned.keys() | by_flag.keys()) & choice.searched.keys()
    for name in twice:
        raise BadInput(
            f"{name} is both held and given another way.",
            way_out="Give it once: held with --hold, or searched with --search.",
        )
    if "lora_r" in choice.own and tuning == "full":
        raise BadInput(
            "--lora-rank needs an adapter, and full tuning has none.",
            way_out="Type --tuning lora, or leave --lora-rank out.",
        )

    # 2. Names and values are possible.
    check_names(assigned, space, accepted_settings(trainer))
    check_names(choice.searched, space)
    choices: dict[str, tuple[KnobValue, ...]] = {}
    held_by_flags = {**assigned, **by_flag}
    for name, value in held_by_flags.items():
        if name in space:
            choices[name] = (value,)
    choices.update(choice.searched)
    check_values(space, choices)
    return choices


def space_around(
    space: SearchSpace,
    trainer: Trainer,
    held_values: Mapping[str, KnobValue],
    stated: Collection[str],
    flag_choices: KnobChoices,
) -> SearchSpace:
    """Return the space with the named choices, around the held configuration.

    Its learning knobs are held. Neutral ones may change, and its own numbers join theirs:
    otherwise it would be the baseline but no candidate, and could be neither confirmed nor kept.
    Knobs that other stated settings determine are left out: a second value would contradict them.
    """
    space = space.with_choices(flag_choices)
    determined = {
        knob
        for knob, settings in trainer.equivalent_settings.items()
        if knob not in stated
        and knob not in flag_choices
        and all(name in stated for name in settings)
    }
    knobs = tuple(knob for knob in space.knobs if knob.name not in determined)
    space = replace(space, knobs=knobs)

    learning = {knob.name for knob in space.learning_knobs(held_values)}
    choices: dict[str, tuple[KnobValue, ...]] = {}
    for knob in space.knobs:
        value = held_values.get(knob.name)
        if value is None or knob.name in flag_choices:
            continue
        if knob.name in learning:
            choices[knob.name] = (value,)
        elif is_number(value):
            choices[knob.name] = _choices_with(knob, value)
        elif isinstance(value, bool) and value not in knob.choices:
            choices[knob.name] = (*knob.choices, value)
    return space.with_choices(choices)


def _choices_with(knob: Knob, value: int | float) -> tuple[KnobValue, ...]:
    """Return the choices of a neutral knob with another number, in the order of its numbers."""
    numbers = [choice for choice in knob.choices if is_number(choice)]
    if not numbers or value in numbers:
        return knob.choices
    names = [choice for choice in knob.choices if not is_number(choice)]
    is_falling = numbers == sorted(numbers, reverse=True)
    falls = len(numbers) > 1 and is_falling
    ordered = sorted([*numbers, value], reverse=falls)
    return (*names, *ordered)

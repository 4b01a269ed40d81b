"""Settings of flags, user's file and framework, merged; the space around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.space import KnobValue, SearchSpace
from autotune.frameworks import shares_in_files
from autotune.frameworks.base import Trainer
from autotune.request.inputs import Sources
from autotune.request.origins import HeldSetting, HeldSettings, Origin, Source, values_of
from autotune.request.precedence import (
    ChosenTuning,
    choose_tuning,
    held_settings,
    settings_of_file,
    settings_of_flags,
)
from autotune.request.resources import memory_limit
from autotune.request.searched_space import named_choices, space_around
from autotune.request.values import FlagValues, SettingChoice


@dataclass(frozen=True, kw_only=True)
class MergedSettings:
    """Settings of all sources, merged by their precedence."""

    tuning: ChosenTuning
    defaults: Mapping[str, KnobValue]  # of the framework, with which the user's file trains
    of_file: HeldSettings  # of the user's file, with these defaults and the tuning
    of_flags: HeldSettings  # of flags and exported variables, under the framework's names
    held_settings: HeldSettings
    flag_choices: Mapping[str, tuple[KnobValue, ...]]  # knobs that flags hold or search


def merge_settings(
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


def completed_settings(
    trainer: Trainer,
    settings: Mapping[str, KnobValue],
) -> dict[str, Any]:
    """Return the settings with the framework's defaults below them."""
    completed: dict[str, Any] = {}
    setting_fields = trainer.fields()
    for name, field_ in setting_fields.items():
        completed[name] = field_.default
    return completed | dict(settings)


def space_of_request(
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

"""Precedence of the sources: where several state a value, the higher one in this table wins.

    source        states                                      against the next lower one
    FLAG          --num-generations, --max-prompt-length and  refused: given twice
                  other flags of one setting
    SET           --set, and each value of --unknown          wins
    HOLD          --hold                                      refused: both held and searched
    SEARCH        --search: the choices of a knob             another setting: both stand
    TUNING        --tuning, or the launch script's kind of    wins
                  tuning: use_peft and load_in_4bit
    FILE          --config, --from-command or --script        wins
    VARIABLE      exported PYTORCH_ALLOC_CONF                 another setting: both stand
    FILE_DEFAULT  the framework's defaults with which the     another setting: both stand
                  user's file trains
    DATA          the longest prompt of the user's data       wins
    SPACE         the knobs of the search space, and what it  wins
                  assumes: tuning, global batch
    FRAMEWORK     the framework's default

Model, dataset, tuning and global batch are those of the flags, else of the file, else of the
space. Framework and method are those of the file, else of the flags, else of the space; two that
differ are refused. What is stated below `--search` stays as the baseline. Within a launch script,
words of the command override the files that it names.

The tests in `tests/request/test_precedence.py` go through the table row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from autotune.core.errors import BadInput
from autotune.core.job import Tuning
from autotune.core.space import KnobValue, SearchSpace
from autotune.frameworks.base import ACCUMULATION, MICRO_BATCH
from autotune.request.origins import (
    HeldSetting,
    HeldSettings,
    Origin,
    Source,
    by_name,
    values_of,
)
from autotune.request.values import FlagValues, SettingChoice, TrainingChoice, UserFile

DEFAULT_FRAMEWORK = "trl"
DEFAULT_METHOD = "grpo"


# Framework and method.


def choose_training(
    flags: TrainingChoice,
    file: UserFile | None,
    space: SearchSpace | None,
) -> tuple[str, str]:
    """Return framework and method. `space`: the one of --space; its own have to agree."""
    framework = flags.framework
    method = flags.method
    stated_by_file = file is not None and file.framework is not None
    if file is not None and stated_by_file:
        _refuse_other(framework, file.framework, "--framework", file)
        _refuse_other(method, file.method, "--method", file)
        framework = file.framework
        method = file.method
    if space is None:
        return framework or DEFAULT_FRAMEWORK, method or DEFAULT_METHOD

    contradictions = []
    if framework not in (None, space.framework):
        contradictions.append(f"--framework {framework}")
    if method not in (None, space.method):
        contradictions.append(f"--method {method}")
    if contradictions:
        left_out = "--space" if stated_by_file else " and ".join(contradictions)
        raise BadInput(
            f"--space: {flags.space} is for {space.method} with {space.framework}, not for"
            f" {' '.join(contradictions)}.",
            way_out=f"Name another of `autotune show spaces`, or leave out {left_out}.",
        )
    return space.framework, space.method


def _refuse_other(
    stated: str | None,
    of_file: str | None,
    flag: str,
    file: UserFile,
) -> None:
    if stated not in (None, of_file):
        raise BadInput(
            f"{flag} {stated}: {file.config.path} trains {file.method} with {file.framework}.",
            way_out=f"Leave {flag} out.",
        )


# Tuning.


@dataclass(frozen=True, kw_only=True)
class ChosenTuning:
    """Trained parameters of a request."""

    tuning: Tuning
    is_stated: bool  # by a flag or a launch script; else the file's settings or the space decide
    settings: HeldSettings  # settings of TRL that --tuning or the launch script means


def choose_tuning(
    flags: FlagValues,
    file: UserFile | None,
    space: SearchSpace,
) -> ChosenTuning:
    # 1. --tuning, the launch script, the settings of the file, or the space.
    origin = None
    if flags.model.tuning is not None:
        tuning = flags.model.tuning
        origin = Origin(source=Source.TUNING, place="--tuning")
    elif file is None:
        tuning = cast(Tuning, space.assume.get("tuning", "lora"))
    elif file.tuning is not None:
        place = str(file.config.path)
        tuning = file.tuning
        origin = Origin(source=Source.TUNING, place=place)
    else:
        tuning = _tuning_under(file.config.settings, "full")
    settings = {} if origin is None else _tuning_settings(tuning, origin)

    # 2. --hold and --set of the same settings win over all of them.
    flag_settings = {**flags.settings.hold, **flags.settings.set}
    stated = values_of(flag_settings)
    trained = _tuning_under(stated, tuning)
    is_stated = origin is not None or trained != tuning
    return ChosenTuning(
        tuning=trained,
        is_stated=is_stated,
        settings=settings,
    )


def _tuning_under(settings: Mapping[str, KnobValue], otherwise: Tuning) -> Tuning:
    """Return the tuning that settings of TRL mean; `otherwise`: where they state nothing."""
    if not settings.get("use_peft", otherwise != "full"):
        return "full"
    is_in_4bit = settings.get("load_in_4bit", otherwise == "qlora")
    return "qlora" if is_in_4bit else "lora"


def _tuning_settings(tuning: Tuning, origin: Origin) -> HeldSettings:
    is_qlora = tuning == "qlora"
    values = {"use_peft": tuning != "full", "load_in_4bit": is_qlora}
    return by_name(
        HeldSetting(
            name=name,
            value=value,
            origin=origin,
        )
        for name, value in values.items()
    )


# Settings.


def settings_of_flags(choice: SettingChoice, canonical: Mapping[str, str]) -> HeldSettings:
    """Return what flags and exported variables hold, under the framework's names."""
    of_flags = [*choice.hold.values(), *choice.set.values()]
    settings = merged(of_flags)
    for name, setting in choice.own.items():
        own_name = canonical.get(name, name)
        settings[own_name] = HeldSetting(
            name=own_name,
            value=setting.value,
            origin=setting.origin,
        )
    return settings


def settings_of_file(
    file: UserFile | None,
    defaults: Mapping[str, KnobValue],
    tuning: ChosenTuning,
) -> HeldSettings:
    """Return what the user's file trains with, before any flag but --tuning."""
    settings: list[HeldSetting] = []
    if file is not None:
        path = str(file.config.path)
        origin = Origin(source=Source.FILE_DEFAULT, place=path)
        for name, value in defaults.items():
            settings.append(
                HeldSetting(
                    name=name,
                    value=value,
                    origin=origin,
                )
            )
        file_settings = file.config.settings
        for name, value in file_settings.items():
            settings.append(
                HeldSetting(
                    name=name,
                    value=value,
                    origin=file.origins[name],
                )
            )
    all_settings = [*settings, *tuning.settings.values()]
    return merged(all_settings)


def held_settings(
    file: HeldSettings,
    flags: HeldSettings,
    unread: frozenset[str] = frozenset(),
) -> HeldSettings:
    """Return all held settings. A micro-batch of a flag drops the file's accumulation, which made
    the file's global batch with the file's micro-batch, unless that is unread.
    """
    of_file = dict(file)
    if MICRO_BATCH in flags.keys() - unread and ACCUMULATION not in flags:
        of_file.pop(ACCUMULATION, None)
    all_settings = [*of_file.values(), *flags.values()]
    return merged(all_settings)


def merged(settings: Iterable[HeldSetting]) -> dict[str, HeldSetting]:
    """Return each setting once, as the highest source states it."""
    chosen: dict[str, HeldSetting] = {}
    for setting in settings:
        lower = chosen.get(setting.name)
        if lower is None or setting.origin.source >= lower.origin.source:
            chosen[setting.name] = setting
    return chosen

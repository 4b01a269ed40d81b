"""Facts about a launched framework that need no code, read from the YAML file of its name.

In texts, `{steps}` is the number of a probe's steps, `{dataset}` the user's data, `{prompt}` a
synthetic prompt, and `{name.of.a.setting}` a whole number among the settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal

import msgspec

from autotune.core.errors import CannotPredict
from autotune.core.measurement import Phase
from autotune.core.space import KnobValue
from autotune.frameworks.base import Settings, as_word
from autotune.frameworks.launched_run import Figures, ReportedSettings, Watch
from autotune.frameworks.settings_table import read_yaml
from autotune.frameworks.stated_rules import Condition, StatedRule

_PLACEHOLDER = re.compile(r"\{([\w.]+)\}")


class Untraced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings without a counterpart in the stand-in step."""

    settings: tuple[str, ...]
    because: str  # reason, with `{name}` and `{value}`
    modelled: tuple[KnobValue, ...] = (None, False)  # values that the stand-in step models
    unmodelled: tuple[KnobValue, ...] | None = None  # instead: the only values that it does not model


class StatedValues(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values of settings that hold if every condition of `when` does."""

    settings: dict[str, KnobValue]  # setting -> value, or the name of a size that is its value
    when: dict[str, Condition] = {}


class StepBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Setting behind `--global-batch`, the completions of one optimizer step."""

    setting: str
    counts: Literal["completions", "prompts"]  # unit of the setting
    steps: str | None = None  # setting with the number of optimizer steps that share the batch; None: one step


class FrameworkFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name, command, settings and output of a framework."""

    # Command.
    name: str
    table: str  # JSON list of its settings, beside this file
    launcher: str  # command before the settings
    hydra: bool = False  # True: the command line has Hydra's grammar, in which some paths need quotes
    requires: dict[str, str]  # module -> pip requirement with its supported versions
    model_settings: tuple[str, ...]  # settings that take the model's folder or name
    own_settings: frozenset[str] = frozenset()  # settings of autotune that are left out of the command line

    # Settings.
    canonical: dict[str, str]  # autotune's flag -> setting
    step_batch: StepBatch | None = None  # None: it follows from micro-batch and accumulation, as in transformers' trainers
    equivalent_settings: dict[str, tuple[str, ...]] = {}  # knob -> settings that together determine its value
    adjusts: tuple[str, ...] = ()  # knobs that take their first legal choice if the default does not suit the hardware
    core: tuple[str, ...]  # settings that every candidate states, with the framework's default unless another is given
    untraced: tuple[Untraced, ...] = ()
    refused_tunings: dict[str, str] = {}  # value of `--tuning` that the framework lacks -> message
    positive: tuple[str, ...] = ()  # settings that must be above zero
    rules: tuple[StatedRule, ...] = ()  # its own checks: the condition under which it refuses, and the message

    # Stand-in step.
    notes: tuple[StatedRule, ...] = ()  # assumptions that a prediction prints
    step: dict[str, KnobValue] = {}  # field of `StandInSpec` -> setting, or its fixed value
    one_row: tuple[StatedValues, ...] = ()  # one row per micro-batch, for packed rows; padded if no condition holds
    adapter: dict[str, str] = {}  # setting of TRL's adapter -> setting
    engine: dict[str, str | int | bool] = {}  # field of `EngineSettings` -> setting, or its fixed value

    # Probe.
    bounded: dict[str, KnobValue]  # settings of a probe, which ends early and neither saves nor evaluates
    data: dict[str, str]  # settings that name the data, `{dataset}` in their values
    rows: str  # setting with the number of prompts of one step: as many synthetic rows are written
    row: Any  # template of a synthetic row, `{prompt}` in its values
    rows_file: str = "rows.jsonl"  # file of the synthetic rows: JSON lines, or a JSON list if it ends in `.json`
    prompt_overhead: int = 0  # upper bound of the tokens that the framework adds to a prompt
    reward_setting: str | None = None  # setting that names the Python file of a synthetic reward
    reward: str | None = None  # that file; None: the framework's own reward
    environment: dict[str, str] = {}
    figures: Figures  # source of completion tokens and of the seconds of whole steps
    figures_times: tuple[str, ...] = ()  # settings whose product is the factor on the reported tokens
    reported_settings: ReportedSettings | None = None  # None: the framework reports none that can be read
    phases: tuple[tuple[str, Phase | None], ...] = ()  # patterns of printed lines that begin a phase; None: a phase ends
    watch: Watch


def refuse_untraced(rows: Iterable[Untraced], settings: Settings, framework: str) -> None:
    """Refuse settings that change the step's memory without a counterpart in the stand-in step."""
    for row in rows:
        for name in row.settings:
            value = settings.get(name)
            if value not in row.modelled if row.unmodelled is None else value in row.unmodelled:
                reason = row.because.format(name=name, value=as_word(value))
                raise CannotPredict(f"{reason}; the stand-in step of {framework} does not model it.")


@cache
def read_facts(name: str) -> FrameworkFacts:
    return msgspec.convert(read_yaml(f"{name.replace('-', '_')}.yaml"), FrameworkFacts)


def filled(template: Any, values: Mapping[str, object]) -> Any:
    """Replace the placeholders of a nested template. A text that is one placeholder keeps its type."""
    if isinstance(template, dict):
        return {name: filled(part, values) for name, part in template.items()}
    if isinstance(template, list):
        return [filled(part, values) for part in template]
    if not isinstance(template, str):
        return template
    if (whole := _PLACEHOLDER.fullmatch(template)) and whole[1] in values:
        return values[whole[1]]
    return _PLACEHOLDER.sub(lambda match: str(values.get(match[1], match[0])), template)

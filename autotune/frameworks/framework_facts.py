"""Facts about launched frameworks that need no code, read from the YAML file of their name, and
their rules.

In texts, `{steps}` is the number of a probe's steps, `{dataset}` the user's data, `{prompt}` a
synthetic prompt, and `{name.of.a.setting}` a whole number among the settings.

A rule or note is a text, and the values of settings for which it applies. A condition is a value, a
list of values, `given`, or a comparison with a number, a setting or a size: `< 2`, `!= gpus`, `not
dividing gpus`, `not divisible by ranks`. In a text, `{name}` is a value and `{name=}` a setting
with its value, as in Python's f-strings.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal

import msgspec

from autotune.core.errors import CannotPredict
from autotune.core.measurement import Phase
from autotune.core.space import KnobValue
from autotune.core.yaml_document import packaged_table
from autotune.frameworks.base import Settings, as_word
from autotune.frameworks.launched_run import Figures, ReportedSettings, Watch

Lookup = Callable[[str], KnobValue]
"""Value of a setting or of a computed size by its name."""

Condition = KnobValue | tuple[KnobValue, ...]

COMPARED = re.compile(r"(<=|>=|<|>|!=|not dividing|not divisible by) ([\w.]+)")
PLACEHOLDER = re.compile(r"\{([\w.]+)(=?)\}")  # in the text of a rule
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "!=": operator.ne,
    "not dividing": lambda value, total: value < 1 or total % value != 0,
    "not divisible by": lambda value, part: part < 1 or value % part != 0,
}
_FILLED = re.compile(r"\{([\w.]+)\}")  # in a template


class StatedRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text that applies if every condition holds."""

    text: str
    when: dict[str, Condition] = {}
    methods: tuple[str, ...] = ()
    """Methods to which it applies; empty: all."""


class Untraced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings without a counterpart in the stand-in step."""

    settings: tuple[str, ...]
    because: str  # reason, with `{name}` and `{value}`
    modelled: tuple[KnobValue, ...] = (None, False)  # values that the stand-in step models
    unmodelled: tuple[KnobValue, ...] | None = (
        None  # instead: the only values that it does not model
    )


class StatedValues(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values of settings that hold if every condition of `when` does."""

    settings: dict[str, KnobValue]  # setting -> value, or the name of a size that is its value
    when: dict[str, Condition] = {}


class StepBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Setting behind `--global-batch`, the completions of one optimizer step."""

    setting: str
    counts: Literal["completions", "prompts"]  # unit of the setting
    steps: str | None = (
        None  # setting with the number of optimizer steps that share the batch; None: one step
    )


class FrameworkFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name, command, settings and output of a framework."""

    # Command.
    name: str
    table: str  # JSON list of its settings, beside this file
    launcher: str  # command before the settings
    hydra: bool = (
        False  # True: the command line has Hydra's grammar, in which some paths need quotes
    )
    requires: dict[str, str]  # module -> pip requirement with its supported versions
    model_settings: tuple[str, ...]  # settings that take the model's folder or name
    own_settings: frozenset[str] = (
        frozenset()
    )  # settings of autotune that are left out of the command line

    # Settings.
    canonical: dict[str, str]  # autotune's flag -> setting
    step_batch: StepBatch | None = (
        None  # None: it follows from micro-batch and accumulation, as in transformers' trainers
    )
    equivalent_settings: dict[
        str, tuple[str, ...]
    ] = {}  # knob -> settings that together determine its value
    adjusts: tuple[
        str, ...
    ] = ()  # knobs that take their first legal choice if the default does not suit the hardware
    core: tuple[
        str, ...
    ]  # settings that every candidate states, with the framework's default unless another is given
    untraced: tuple[Untraced, ...] = ()
    refused_tunings: dict[str, str] = {}  # value of `--tuning` that the framework lacks -> message
    positive: tuple[str, ...] = ()  # settings that must be above zero
    rules: tuple[
        StatedRule, ...
    ] = ()  # its own checks: the condition under which it refuses, and the message

    # Stand-in step.
    notes: tuple[StatedRule, ...] = ()  # assumptions that a prediction prints
    step: dict[str, KnobValue] = {}  # field of `StandInSpec` -> setting, or its fixed value
    one_row: tuple[
        StatedValues, ...
    ] = ()  # one row per micro-batch, for packed rows; padded if no condition holds
    adapter: dict[str, str] = {}  # setting of TRL's adapter -> setting
    engine: dict[
        str, str | int | bool
    ] = {}  # field of `EngineSettings` -> setting, or its fixed value

    # Probe.
    bounded: dict[
        str, KnobValue
    ]  # settings of a probe, which ends early and neither saves nor evaluates
    data: dict[str, str]  # settings that name the data, `{dataset}` in their values
    rows: str  # setting with the number of prompts of one step: as many synthetic rows are written
    row: Any  # template of a synthetic row, `{prompt}` in its values
    rows_file: str = (
        "rows.jsonl"  # file of the synthetic rows: JSON lines, or a JSON list if it ends in `.json`
    )
    prompt_overhead: int = 0  # upper bound of the tokens that the framework adds to a prompt
    reward_setting: str | None = None  # setting that names the Python file of a synthetic reward
    reward: str | None = None  # that file; None: the framework's own reward
    environment: dict[str, str] = {}
    figures: Figures  # source of completion tokens and of the seconds of whole steps
    figures_times: tuple[
        str, ...
    ] = ()  # settings whose product is the factor on the reported tokens
    reported_settings: ReportedSettings | None = (
        None  # None: the framework reports none that can be read
    )
    phases: tuple[
        tuple[str, Phase | None], ...
    ] = ()  # patterns of printed lines that begin a phase; None: a phase ends
    watch: Watch


class Unread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings without effect if every condition holds: they would separate equal candidates."""

    settings: tuple[str, ...]
    when: dict[str, Condition]


class TrainerFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a framework and its own checks."""

    version: str
    requires: dict[str, str]  # module -> pip requirement with its supported versions
    defaults: dict[
        str, dict[str, KnobValue]
    ]  # settings that candidates state: `common`, and those of each method
    canonical: dict[str, dict[str, str]]  # method -> autotune's flag -> setting
    implied: dict[str, dict[str, KnobValue]]  # value of `--tuning` -> settings
    batch_factors: str  # factors of the global batch, for a message
    choices: dict[str, tuple[KnobValue, ...]]
    unread: tuple[Unread, ...]
    rules: tuple[StatedRule, ...]
    notes: tuple[StatedRule, ...]
    untraced: tuple[Untraced, ...] = ()
    deepspeed: dict[
        str, dict[str, KnobValue]
    ] = {}  # sharding -> options of the framework's own DeepSpeed configuration


def refuse_untraced(rows: Iterable[Untraced], settings: Settings, framework: str) -> None:
    """Refuse settings that change the step's memory without a counterpart in the stand-in step."""
    for row in rows:
        for name in row.settings:
            value = settings.get(name)
            if value not in row.modelled if row.unmodelled is None else value in row.unmodelled:
                reason = row.because.format(name=name, value=as_word(value))
                raise CannotPredict(
                    f"{reason}; the stand-in step of {framework} does not model it."
                )


@cache
def read_facts(name: str) -> FrameworkFacts:
    return packaged_table("autotune.frameworks", f"{name.replace('-', '_')}.yaml", FrameworkFacts)


def filled(template: Any, values: Mapping[str, object]) -> Any:
    """Replace the placeholders of a nested template. A text that is one placeholder keeps its
    type.
    """
    if isinstance(template, dict):
        return {name: filled(part, values) for name, part in template.items()}
    if isinstance(template, list):
        return [filled(part, values) for part in template]
    if not isinstance(template, str):
        return template
    if (whole := _FILLED.fullmatch(template)) and whole[1] in values:
        return values[whole[1]]
    return _FILLED.sub(lambda match: str(values.get(match[1], match[0])), template)


def texts_that_apply(rules: Iterable[StatedRule], method: str, lookup: Lookup) -> Iterator[str]:
    """Yield the texts of the rules that apply, with their values filled in."""
    for rule in rules:
        if (not rule.methods or method in rule.methods) and holds(rule.when, lookup):
            yield PLACEHOLDER.sub(
                lambda found: (
                    f"{found[1]}={as_word(lookup(found[1]))}"
                    if found[2]
                    else as_word(lookup(found[1]))
                ),
                rule.text,
            )


def holds(when: Mapping[str, Condition], lookup: Lookup) -> bool:
    return all(
        _condition_holds(condition, lookup(name), lookup) for name, condition in when.items()
    )


def _condition_holds(condition: Condition, value: KnobValue, lookup: Lookup) -> bool:
    if isinstance(condition, tuple):
        return value in condition
    if condition == "given":
        return value not in (None, "")
    if isinstance(condition, str) and (found := COMPARED.fullmatch(condition)):
        if isinstance(value, str):
            return found[1] == "!=" and value != found[2]
        other = float(found[2]) if found[2].isdigit() else _number(lookup(found[2]))
        return _COMPARISONS[found[1]](_number(value), other)
    return value == condition


def _number(value: KnobValue) -> float:
    return float(value) if isinstance(value, int | float) else 0.0

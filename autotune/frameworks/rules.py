"""Rules of a framework as data: a text, and the values of settings for which it applies.

A condition is a value, a list of values, `given`, or a comparison with a number, a setting or a
size: `< 2`, `!= gpus`, `not dividing gpus`, `not divisible by ranks`. In a text, `{name}` is a
value and `{name=}` a setting with its value, as in Python's f-strings.

With the values batch=6, gpus=4 the rule

    text: "{batch=} is not divisible by {gpus} GPUs."
    when: {batch: not divisible by gpus}

applies and reads `batch=6 is not divisible by 4 GPUs.`
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from autotune.core.errors import NotModelled
from autotune.core.space import KnobValue
from autotune.frameworks.base import Settings, as_word

Lookup = Callable[[str], KnobValue]
"""Value of a setting or of a computed size by its name."""

Condition = KnobValue | tuple[KnobValue, ...]

COMPARED = re.compile(r"(<=|>=|<|>|!=|not dividing|not divisible by) ([\w.]+)")
PLACEHOLDER = re.compile(r"\{([\w.]+)(=?)\}")  # in the text of a rule


class StatedRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text that applies if every condition holds."""

    text: str
    when: dict[str, Condition] = {}
    methods: tuple[str, ...] = ()
    """Methods to which it applies; empty: all."""


class StatedValues(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values of settings that hold if every condition of `when` does."""

    settings: dict[str, KnobValue]  # setting -> value, or the name of a size that is its value
    when: dict[str, Condition] = {}


class Unread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings without effect if every condition holds: they would separate equal candidates."""

    settings: tuple[str, ...]
    when: dict[str, Condition]


WITHOUT_IT = (None, False)
"""Values of a setting that is left out."""


class Untraced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings without a counterpart in the stand-in step."""

    settings: tuple[str, ...]
    because: str  # reason, with `{name}` and `{value}`
    modelled: tuple[KnobValue, ...] = WITHOUT_IT  # values that the stand-in step models
    unmodelled: tuple[KnobValue, ...] | None = None
    """Values that the stand-in step does not model; None: all but `modelled`. Beside them,
    `modelled` has those that can be predicted instead.
    """

    methods: tuple[str, ...] = ()  # to which it applies; empty: all
    otherwise: str = ""
    """Meaning of a prediction without it for a training with it; empty: none."""

    def models(self, value: KnobValue) -> bool:
        if self.unmodelled is not None:
            return value not in self.unmodelled
        return value in self.modelled


def refuse_untraced(
    rows: Iterable[Untraced],
    settings: Settings,
    framework: str,
    method: str,
) -> None:
    """Refuse settings that change the step's memory without a counterpart in the stand-in step."""
    for row in rows:
        if row.methods and method not in row.methods:
            continue
        for name in row.settings:
            value = settings.get(name)
            if not row.models(value):
                reason = row.because.format(name=name, value=as_word(value))
                raise NotModelled(
                    f"{reason}; the stand-in step of {framework} does not model it.",
                    way_out=_modelled_instead(row, name),
                    setting=name,
                    instead=_modelled_value(row),
                    effect=row.otherwise,
                )


def _modelled_instead(row: Untraced, name: str) -> str:
    if row.unmodelled is not None and row.modelled == WITHOUT_IT:
        return f"Give {name} another value with --set."
    value = _modelled_value(row)
    return f"Predict it without: --set {name}={'null' if value is None else as_word(value)}."


def _modelled_value(row: Untraced) -> KnobValue:
    return next((value for value in row.modelled if value is not None), None)


def texts_that_apply(
    rules: Iterable[StatedRule],
    method: str,
    lookup: Lookup,
) -> Iterator[str]:
    """Yield the texts of the rules that apply, with their values filled in."""
    for rule in rules:
        concerns_method = not rule.methods or method in rule.methods
        if concerns_method and holds(rule.when, lookup):
            yield _filled_in(rule.text, lookup)


def _filled_in(text: str, lookup: Lookup) -> str:
    def value_of(placeholder: re.Match[str]) -> str:
        name, equals_sign = placeholder.groups()
        word = as_word(lookup(name))
        return f"{name}={word}" if equals_sign else word

    return PLACEHOLDER.sub(value_of, text)


def holds(when: Mapping[str, Condition], lookup: Lookup) -> bool:
    return all(
        _condition_holds(condition, lookup(name), lookup) for name, condition in when.items()
    )


def _condition_holds(
    condition: Condition,
    value: KnobValue,
    lookup: Lookup,
) -> bool:
    if isinstance(condition, tuple):
        return value in condition
    if condition == "given":
        return value not in (None, "")
    if not isinstance(condition, str):
        return value == condition
    comparison = COMPARED.fullmatch(condition)
    if comparison is None:
        return value == condition

    operation, operand = comparison.groups()
    if isinstance(value, str):
        return operation == "!=" and value != operand
    if operand.isdigit():
        return _COMPARISONS[operation](_number(value), float(operand))
    return _COMPARISONS[operation](_number(value), _number(lookup(operand)))


def _number(value: KnobValue) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _does_not_divide(divisor: float, total: float) -> bool:
    return divisor < 1 or total % divisor != 0


def _is_not_divisible(total: float, divisor: float) -> bool:
    return _does_not_divide(divisor, total)


_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "!=": operator.ne,
    "not dividing": _does_not_divide,
    "not divisible by": _is_not_divisible,
}

"""Rules and notes of a framework as data: a text, and the values of settings for which it applies.

A condition is a value, a list of values, `given`, or a comparison with a number, a setting or a
size: `< 2`, `!= gpus`, `not dividing gpus`, `not divisible by ranks`. In a text, `{name}` is a value
and `{name=}` a setting with its value, as in Python's f-strings.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator

import msgspec

from autotune.core.space import KnobValue
from autotune.frameworks.base import as_word

Lookup = Callable[[str], KnobValue]
"""Value of a setting or of a computed size by its name."""

Condition = KnobValue | tuple[KnobValue, ...]

COMPARED = re.compile(r"(<=|>=|<|>|!=|not dividing|not divisible by) ([\w.]+)")
PLACEHOLDER = re.compile(r"\{([\w.]+)(=?)\}")
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "!=": operator.ne,
    "not dividing": lambda value, total: value < 1 or total % value != 0,
    "not divisible by": lambda value, part: part < 1 or value % part != 0,
}


class StatedRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text that applies if every condition holds."""

    text: str
    when: dict[str, Condition] = {}
    methods: tuple[str, ...] = ()
    """Methods to which it applies; empty: all."""

    def applies(self, method: str, lookup: Lookup) -> bool:
        of_method = not self.methods or method in self.methods
        return of_method and all(_holds(condition, lookup(name), lookup) for name, condition in self.when.items())


def texts_that_apply(rules: Iterable[StatedRule], method: str, lookup: Lookup) -> Iterator[str]:
    """Yield the texts of the rules that apply, with their values filled in."""
    for rule in rules:
        if rule.applies(method, lookup):
            yield PLACEHOLDER.sub(lambda found: f"{found[1]}={as_word(lookup(found[1]))}" if found[2] else
                                   as_word(lookup(found[1])), rule.text)  # fmt: skip


def _holds(condition: Condition, value: KnobValue, lookup: Lookup) -> bool:
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

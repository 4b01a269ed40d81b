"""What `expr` prints: whole numbers, comparisons, and parts of texts.

alternative  conjunction { | conjunction }
conjunction  comparison { & comparison }
comparison   sum { (< | <= | = | != | >= | >) sum }
sum          product { (+ | -) product }
product      match { (* | / | %) match }
match        value { : value }
value        length TEXT | substr TEXT PLACE COUNT | ( alternative ) | TEXT
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from autotune.core.shell.arithmetic import whole_quotient, whole_remainder
from autotune.core.shell.posix_patterns import compiled

_EMPTY = ("", "0")
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_LEVELS = (("|",), ("&",), ("<", "<=", "=", "==", "!=", ">=", ">"), ("+", "-"), ("*", "/", "%"))
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "<": lambda first, second: first < second,
    "<=": lambda first, second: first <= second,
    "=": lambda first, second: first == second,
    "==": lambda first, second: first == second,
    "!=": lambda first, second: first != second,
    ">=": lambda first, second: first >= second,
    ">": lambda first, second: first > second,
}
_COMPUTED: dict[str, Callable[[int, int], int]] = {
    "+": lambda first, second: first + second,
    "-": lambda first, second: first - second,
    "*": lambda first, second: first * second,
    "/": whole_quotient,
    "%": whole_remainder,
}


def expression_value(arguments: Sequence[str]) -> str | None:
    """Return the value of an expression; None: it is not read."""
    reader = _ExpressionReader(arguments)
    try:
        value = reader.value_at(0)
    except (ValueError, IndexError, ZeroDivisionError):
        return None
    if not reader.is_done:
        return None
    return value


class _ExpressionReader:
    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._place = 0

    @property
    def is_done(self) -> bool:
        return self._place == len(self._arguments)

    def value_at(self, level: int) -> str:
        """Return the value of an operation at this level of `_LEVELS`, or of a tighter one."""
        if level == len(_LEVELS):
            return self._match()
        value = self.value_at(level + 1)
        while not self.is_done and self._arguments[self._place] in _LEVELS[level]:
            sign = self._next()
            value = _joined(value, sign, self.value_at(level + 1))
        return value

    def _match(self) -> str:
        value = self._operand()
        while not self.is_done and self._arguments[self._place] == ":":
            self._next()
            value = _matched(value, self._operand())
        return value

    def _operand(self) -> str:
        word = self._next()
        if word == "(":
            value = self.value_at(0)
            if self._next() != ")":
                raise ValueError("a bracket is not closed")
            return value
        if word == "length":
            return str(len(self._operand()))
        if word == "substr":
            text, place, count = self._operand(), int(self._operand()), int(self._operand())
            if place <= 0 or count <= 0:
                return ""
            return text[place - 1 : place - 1 + count]
        if word in ("match", "index", "+", ")"):
            raise ValueError("an operation that is not read")
        return word

    def _next(self) -> str:
        word = self._arguments[self._place]
        self._place += 1
        return word


def _joined(first: str, sign: str, second: str) -> str:
    is_empty = first in _EMPTY
    if sign == "|" and is_empty:
        return second or "0"
    if sign == "&" and (is_empty or second in _EMPTY):
        return "0"
    if sign in ("|", "&"):
        return first
    are_numbers = _NUMBER.fullmatch(first) and _NUMBER.fullmatch(second)
    if sign in _COMPARED and are_numbers:
        return str(int(_COMPARED[sign](int(first), int(second))))
    if sign in ("=", "==", "!="):
        return str(int((first == second) is (sign != "!=")))
    if not are_numbers:
        raise ValueError("no whole numbers")
    return str(_COMPUTED[sign](int(first), int(second)))


def _matched(text: str, pattern: str) -> str:
    """Return the first group of a pattern that stands at the front, or the length of the match."""
    expression = compiled(pattern, is_extended=False, longest_text=len(text))
    if expression is None:
        raise ValueError("a pattern that is not read")
    match = expression.match(text)
    if expression.groups:
        return "" if match is None else match[1] or ""
    length = 0
    if match is not None:
        length = len(match[0])
    return str(length)

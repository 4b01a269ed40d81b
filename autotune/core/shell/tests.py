"""Results of `test`, `[ ... ]`, `[[ ... ]]` and `(( ... ))` in a shell script.

    expression   disjunction
    disjunction  conjunction { (-o | ||) conjunction }
    conjunction  negation { (-a | &&) negation }
    negation     ! negation | ( disjunction ) | primary
    primary      OPERATOR operand | operand OPERATOR operand | operand

A result is None where only a run has it.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.shell.patterns import matches_pattern
from autotune.core.shell.variable_values import UNKNOWN
from autotune.core.shell.words import Expansion

Token = tuple[str, bool]
"""Expanded text of an operator or operand, and whether it was quoted."""

_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_BINARY = {*_COMPARISONS, "=", "==", "!=", "=~", "<", ">"}
_FILES = {"-f", "-d", "-e", "-s", "-r", "-w", "-x", "-L"}
_TEXTS = {"-n", "-z"}

# Patterns of `=~` whose search takes time in proportion to the text.
_PART = r"[\w./:-]|\\.|\[\^?[\w.-]+\][+*]?|\.\*"
_SIMPLE_PATTERN = re.compile(rf"\^?(?:{_PART}|\((?:{_PART})*\))*\$?", re.ASCII)
MAX_MATCHED = 1000  # characters that `=~` looks at


@dataclass
class Surroundings:
    """What a test looks at beside its words, and what it leaves behind."""

    folder: str = ""
    files: Container[str] = ()  # that the script writes, by path
    is_set: Callable[[str], bool | None] = lambda name: None
    groups: list[str] | None = None  # of the last `=~`, which are `BASH_REMATCH`


def test_outcome(
    tokens: Sequence[Token],
    surroundings: Surroundings,
) -> bool | None:
    """Return the result of a test, None where only a run has it."""
    if not tokens:
        return False
    reader = _Reader(tokens, surroundings)
    outcome = reader.disjunction()
    return outcome if reader.is_done else None


def arithmetic_outcome(
    raw: str,
    expansion: Expansion,
    *,
    certain: bool = True,
) -> bool | None:
    """Return the result of `(( raw ))`: a number other than 0 is true."""
    number = expansion.arithmetic(raw, certain=certain)
    return None if UNKNOWN in number else number != "0"


class _Reader:
    def __init__(
        self,
        tokens: Sequence[Token],
        surroundings: Surroundings,
    ) -> None:
        self._tokens = list(tokens)
        self._surroundings = surroundings
        self._place = 0

    @property
    def is_done(self) -> bool:
        return self._place >= len(self._tokens)

    def disjunction(self) -> bool | None:
        outcome = self._conjunction()
        while self._takes("-o", "||"):
            outcome = _either(outcome, self._conjunction())
        return outcome

    def _conjunction(self) -> bool | None:
        outcome = self._negation()
        while self._takes("-a", "&&"):
            outcome = _both(outcome, self._negation())
        return outcome

    def _negation(self) -> bool | None:
        if self._takes("!"):
            outcome = self._negation()
            return None if outcome is None else not outcome
        if self._takes("("):
            outcome = self.disjunction()
            self._takes(")")
            return outcome
        return self._primary()

    def _primary(self) -> bool | None:
        first, _ = self._next()
        follows = self._peek()
        if follows in _BINARY:
            sign, _ = self._next()
            second, is_quoted = self._next()
            if sign == "=~":
                return self._found(first, second)
            return _compared(first, sign, second, is_quoted)
        if first in _FILES | _TEXTS | {"-v"} and follows is not None:
            operand, _ = self._next()
            if first == "-v":
                return self._surroundings.is_set(operand)
            return _unary(first, operand, self._surroundings)
        return None if UNKNOWN in first else bool(first)

    def _found(self, text: str, pattern: str) -> bool | None:
        """Return the result of `=~`, and keep what its groups match."""
        if UNKNOWN in text + pattern:
            return None
        if len(text) > MAX_MATCHED or not _SIMPLE_PATTERN.fullmatch(pattern):
            return None
        match = re.search(pattern, text)
        if match is not None:
            self._surroundings.groups = [match[0], *(group or "" for group in match.groups())]
        return match is not None

    def _next(self) -> Token:
        if self.is_done:
            return "", True
        token = self._tokens[self._place]
        self._place += 1
        return token

    def _peek(self) -> str | None:
        return None if self.is_done else self._tokens[self._place][0]

    def _takes(self, *signs: str) -> bool:
        if self.is_done or self._tokens[self._place][0] not in signs:
            return False
        self._place += 1
        return True


def _unary(
    sign: str,
    operand: str,
    surroundings: Surroundings,
) -> bool | None:
    if UNKNOWN in operand:
        return None
    if sign in _TEXTS:
        return bool(operand) is (sign == "-n")
    if "\0" in operand or len(operand) > MAX_MATCHED:
        return False
    path = Path(surroundings.folder, operand)
    if not surroundings.folder and not path.is_absolute():
        return None
    if sign not in ("-d", "-x", "-L") and os.path.normpath(path) in surroundings.files:
        return True
    try:
        if sign == "-d":
            return path.is_dir()
        if sign == "-x":
            return os.access(path, os.X_OK)
        return path.is_file() if sign in ("-f", "-s") else path.exists()
    except OSError:
        return None


def _compared(
    first: str,
    sign: str,
    second: str,
    is_quoted: bool,
) -> bool | None:
    if UNKNOWN in first or UNKNOWN in second:
        return None
    if sign in _COMPARISONS:
        try:
            return _COMPARISONS[sign](int(first), int(second))
        except ValueError:
            return None
    if sign in ("<", ">"):
        return first < second if sign == "<" else first > second
    is_equal = first == second if is_quoted else _matches(first, second)
    return None if is_equal is None else is_equal is (sign != "!=")


def _matches(text: str, pattern: str) -> bool | None:
    """Return the result of `[[ TEXT == PATTERN ]]`, where `+(a|b)` always is a pattern."""
    return matches_pattern(text, pattern, has_extended=True)


def _both(
    first: bool | None,
    second: bool | None,
) -> bool | None:
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def _either(
    first: bool | None,
    second: bool | None,
) -> bool | None:
    if first is True or second is True:
        return True
    return None if first is None or second is None else False

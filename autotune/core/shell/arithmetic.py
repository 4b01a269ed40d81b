"""Arithmetic of whole numbers in a shell script: `$((...))`, `((...))` and `let`.

    assignment   NAME (= | += | *= ...) assignment | choice
    choice       operation [ ? assignment : assignment ]
    operation    unary { OPERATOR unary }, by the precedence of C
    unary        (- | + | ! | ~ | ++ | --) unary | power
    power        value [ ** unary ]
    value        NUMBER | NAME [ ++ | -- ] | ( assignments )

A NAME may be an item of an array, `A[i]`.

`((N = 4, N += 2))` calls `write("N", 4)`, then `write("N", 6)`. A value is None where only a run of
the script has it; so is all that is computed from it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

ShellNumber = int | None

LARGEST_NUMBER = 2**63
MAX_TOKENS = 500

_TOKEN = re.compile(
    r"\s*(?P<token>[0-9]+#[0-9a-zA-Z]+|0[xX][0-9a-fA-F]+|[0-9]+"
    r"|[A-Za-z_][A-Za-z0-9_]*(?:\[[^][]*\])?"
    r"|<<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&^|]=|[-+*/%&^|~!<>=?:(),])"
)
_ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|=")


def whole_quotient(first: int, second: int) -> int:
    """C cuts towards zero, Python rounds down."""
    quotient = abs(first) // abs(second)
    if (first < 0) == (second < 0):
        return quotient
    return -quotient


def whole_remainder(first: int, second: int) -> int:
    return first - second * whole_quotient(first, second)


def _shifted(first: int, second: int) -> int:
    if not 0 <= second < 64:
        raise ValueError("a shift beyond the size of a number")
    return first << second


def _power(first: int, second: int) -> int:
    if not 0 <= second < 64:
        raise ValueError("a power beyond the size of a number")
    power: int = first**second
    return power


_OPERATIONS: Mapping[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (1, lambda first, second: bool(first or second)),
    "&&": (2, lambda first, second: bool(first and second)),
    "|": (3, operator.or_),
    "^": (4, operator.xor),
    "&": (5, operator.and_),
    "==": (6, operator.eq),
    "!=": (6, operator.ne),
    "<": (7, operator.lt),
    "<=": (7, operator.le),
    ">": (7, operator.gt),
    ">=": (7, operator.ge),
    "<<": (8, _shifted),
    ">>": (8, operator.rshift),
    "+": (9, operator.add),
    "-": (9, operator.sub),
    "*": (10, operator.mul),
    "/": (10, whole_quotient),
    "%": (10, whole_remainder),
}
"""Sign -> precedence and operation."""


def _is_name(token: str) -> bool:
    return token[:1].isalpha() or token[:1] == "_"


@dataclass(frozen=True, kw_only=True)
class Variables:
    """Variables of a formula."""

    read: Callable[[str], ShellNumber]
    write: Callable[[str, ShellNumber], None]


def formula_value(text: str, variables: Variables) -> ShellNumber:
    """Return the value of a formula; raise ValueError where it is none."""
    reader = _FormulaReader(_tokens(text), variables)
    value = reader.assignments()
    if not reader.is_done:
        raise ValueError("no whole-number arithmetic")
    return value


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    place = 0
    stripped = text.rstrip()
    while place < len(stripped):
        match = _TOKEN.match(stripped, place)
        if match is None or len(tokens) > MAX_TOKENS:
            raise ValueError("no whole-number arithmetic")
        tokens.append(match["token"])
        place = match.end()
    return tokens


class _FormulaReader:
    def __init__(self, tokens: list[str], variables: Variables) -> None:
        self._tokens = tokens
        self._variables = variables
        self._place = 0
        self._is_skipped = False  # a part that C would not compute assigns nothing

    @property
    def is_done(self) -> bool:
        return self._place >= len(self._tokens)

    def assignments(self) -> ShellNumber:
        value = self._assignment()
        while self._takes(","):
            value = self._assignment()
        return value

    def _assignment(self) -> ShellNumber:
        name = self._peek()
        sign = self._peek(1)
        if not _is_name(name) or sign not in _ASSIGNMENTS:
            return self._choice()
        self._place += 2
        value = self._assignment()
        if sign != "=":
            value = self._computed(sign[:-1], self._variables.read(name), value)
        return self._written(name, value)

    def _choice(self) -> ShellNumber:
        condition = self._operation(1)
        if not self._takes("?"):
            return condition
        first = self._skipped_unless(condition != 0, self._assignment)
        self._expect(":")
        is_second_reached = condition == 0 or condition is None
        second = self._skipped_unless(is_second_reached, self._assignment)
        if condition:
            return first
        return None if condition is None else second

    def _operation(self, lowest: int) -> ShellNumber:
        value = self._unary()
        while self._peek() in _OPERATIONS:
            sign = self._peek()
            precedence, _ = _OPERATIONS[sign]
            if precedence < lowest:
                return value
            self._place += 1
            value = self._computed(sign, value, self._operand(sign, value, precedence))
        return value

    def _operand(self, sign: str, first: ShellNumber, precedence: int) -> ShellNumber:
        is_decided = sign == "&&" and first == 0
        is_decided |= sign == "||" and bool(first)
        return self._skipped_unless(not is_decided, lambda: self._operation(precedence + 1))

    def _unary(self) -> ShellNumber:
        sign = self._peek()
        if sign in ("++", "--"):
            self._place += 1
            return self._stepped(self._next(), sign)
        if sign not in ("-", "+", "!", "~"):
            return self._power()
        self._place += 1
        value = self._unary()
        if value is None:
            return None
        results = {"-": -value, "+": value, "!": int(value == 0), "~": ~value}
        return results[sign]

    def _power(self) -> ShellNumber:
        base = self._value()
        if not self._takes("**"):
            return base
        exponent = self._unary()
        if base is None or exponent is None:
            return None
        return _within_size(_power(base, exponent))

    def _value(self) -> ShellNumber:
        token = self._next()
        if token == "(":
            value = self.assignments()
            self._expect(")")
            return value
        if token[0].isdigit():
            return _number(token)
        value = self._variables.read(token)
        sign = self._peek()
        if sign in ("++", "--"):
            self._place += 1
            self._stepped(token, sign)
        return value

    def _stepped(self, name: str, sign: str) -> ShellNumber:
        if not _is_name(name):
            raise ValueError("no variable to count with")
        before = self._variables.read(name)
        return self._written(name, self._computed(sign[0], before, 1))

    def _written(self, name: str, value: ShellNumber) -> ShellNumber:
        if not self._is_skipped:
            self._variables.write(name, value)
        return value

    def _computed(self, sign: str, first: ShellNumber, second: ShellNumber) -> ShellNumber:
        is_skipped_division = self._is_skipped and not second
        if first is None or second is None or is_skipped_division:
            return None
        _, operation = _OPERATIONS[sign]
        return _within_size(int(operation(first, second)))

    def _skipped_unless(self, is_reached: bool, read: Callable[[], ShellNumber]) -> ShellNumber:
        before = self._is_skipped
        self._is_skipped = before or not is_reached
        try:
            value = read()
        finally:
            self._is_skipped = before
        if not is_reached:
            return 0
        return value

    # Tokens.

    def _peek(self, ahead: int = 0) -> str:
        place = self._place + ahead
        if place >= len(self._tokens):
            return ""
        return self._tokens[place]

    def _next(self) -> str:
        token = self._peek()
        self._place += 1
        is_value = token == "(" or token[:1].isalnum() or token[:1] == "_"
        if not is_value:
            raise ValueError("no whole-number arithmetic")
        return token

    def _takes(self, sign: str) -> bool:
        is_next = self._peek() == sign
        self._place += is_next
        return is_next

    def _expect(self, sign: str) -> None:
        if not self._takes(sign):
            raise ValueError(f"{sign} is missing")


def _number(token: str) -> int:
    base, sign, digits = token.partition("#")
    if sign:
        return int(digits, int(base))
    if token[:2] in ("0x", "0X"):
        return int(token, 16)
    is_octal = token[0] == "0"
    base_of_token = 8 if is_octal else 10
    return _within_size(int(token, base_of_token))


def _within_size(number: int) -> int:
    if abs(number) >= LARGEST_NUMBER:
        raise ValueError("a number beyond 64 bits")
    return number

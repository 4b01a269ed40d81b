"""Arithmetic of whole numbers in a shell script: `$((...))`, `((...))` and `let`.

    assignment   NAME (= | += | *= ...) assignment | choice
    choice       operation [ ? assignment : assignment ]
    operation    unary { OPERATOR unary }, by the precedence of C
    unary        (- | + | ! | ~ | ++ | --) unary | power
    power        value [ ** unary ]
    value        NUMBER | NAME [ ++ | -- ] | ( assignments )

`((N = 4, N += 2))` calls `write("N", 4)`, then `write("N", 6)`. A value is None where only a run of
the script has it; so is all that is computed from it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Number = int | None

LARGEST = 2**63
MAX_TOKENS = 500

_TOKEN = re.compile(
    r"\s*(?P<token>[0-9]+#[0-9a-zA-Z]+|0[xX][0-9a-fA-F]+|[0-9]+|[A-Za-z_][A-Za-z0-9_]*"
    r"|<<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&^|]=|[-+*/%&^|~!<>=?:(),])"
)
_ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|=")


def _quotient(left: int, right: int) -> int:
    """C cuts towards zero, Python rounds down."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: int, right: int) -> int:
    return left - right * _quotient(left, right)


def _shifted(left: int, right: int) -> int:
    if not 0 <= right < 64:
        raise ValueError("a shift beyond the size of a number")
    return left << right


def _power(left: int, right: int) -> int:
    if not 0 <= right < 64:
        raise ValueError("a power beyond the size of a number")
    return left**right


_OPERATIONS: Mapping[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (1, lambda left, right: left != 0 or right != 0),
    "&&": (2, lambda left, right: left != 0 and right != 0),
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
    "/": (10, _quotient),
    "%": (10, _remainder),
}
"""Sign -> precedence and operation."""


@dataclass(frozen=True, kw_only=True)
class Variables:
    """Variables of a formula."""

    read: Callable[[str], Number]
    write: Callable[[str, Number], None]


def formula_value(text: str, variables: Variables) -> Number:
    """Return the value of a formula; raise ValueError where it is none."""
    reader = _Reader(_tokens(text), variables)
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


class _Reader:
    def __init__(self, tokens: list[str], variables: Variables) -> None:
        self._tokens = tokens
        self._variables = variables
        self._place = 0
        self._is_skipped = False  # a part that C would not compute assigns nothing

    @property
    def is_done(self) -> bool:
        return self._place >= len(self._tokens)

    def assignments(self) -> Number:
        value = self._assignment()
        while self._takes(","):
            value = self._assignment()
        return value

    def _assignment(self) -> Number:
        name = self._peek()
        sign = self._peek(1)
        if not name.isidentifier() or sign not in _ASSIGNMENTS:
            return self._choice()
        self._place += 2
        value = self._assignment()
        if sign != "=":
            value = self._computed(sign[:-1], self._variables.read(name), value)
        return self._written(name, value)

    def _choice(self) -> Number:
        condition = self._operation(1)
        if not self._takes("?"):
            return condition
        first = self._skipped_unless(condition != 0, self._assignment)
        self._expect(":")
        second = self._skipped_unless(condition == 0 or condition is None, self._assignment)
        if condition is None:
            return None
        return first if condition else second

    def _operation(self, lowest: int) -> Number:
        value = self._unary()
        while self._peek() in _OPERATIONS:
            sign = self._peek()
            precedence, _ = _OPERATIONS[sign]
            if precedence < lowest:
                return value
            self._place += 1
            value = self._computed(sign, value, self._right_side(sign, value, precedence))
        return value

    def _right_side(self, sign: str, left: Number, precedence: int) -> Number:
        is_decided = (sign == "&&" and left == 0) or (sign == "||" and bool(left))
        return self._skipped_unless(not is_decided, lambda: self._operation(precedence + 1))

    def _unary(self) -> Number:
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

    def _power(self) -> Number:
        base = self._value()
        if not self._takes("**"):
            return base
        exponent = self._unary()
        if base is None or exponent is None:
            return None
        return _within_size(_power(base, exponent))

    def _value(self) -> Number:
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

    def _stepped(self, name: str, sign: str) -> Number:
        if not name.isidentifier():
            raise ValueError("no variable to count with")
        step = 1 if sign == "++" else -1
        return self._written(name, self._computed("+", self._variables.read(name), step))

    def _written(self, name: str, value: Number) -> Number:
        if not self._is_skipped:
            self._variables.write(name, value)
        return value

    def _computed(self, sign: str, left: Number, right: Number) -> Number:
        if left is None or right is None or (self._is_skipped and not right):
            return None
        _, operation = _OPERATIONS[sign]
        return _within_size(int(operation(left, right)))

    def _skipped_unless(self, is_reached: bool, read: Callable[[], Number]) -> Number:
        before = self._is_skipped
        self._is_skipped = before or not is_reached
        try:
            value = read()
        finally:
            self._is_skipped = before
        return value if is_reached else 0

    # Tokens.

    def _peek(self, ahead: int = 0) -> str:
        place = self._place + ahead
        return self._tokens[place] if place < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._place += 1
        if not token or not (token == "(" or token[0].isalnum() or token[0] == "_"):
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
    return _within_size(int(token, 8 if token[0] == "0" else 10))


def _within_size(number: int) -> int:
    if abs(number) >= LARGEST:
        raise ValueError("a number beyond 64 bits")
    return number

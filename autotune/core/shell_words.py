"""Tokens of a shell script, and their expansion: quotes, variables, arrays, arithmetic, and what
is unknown.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autotune.core.errors import BadInput

MAX_WORDS = 100_000
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)")
_REDIRECTION = re.compile(r"(\d*)(<<<|<<-?|>>|>&|<&|&>>?|>\||>|<)")
_OPERATORS = ("&&", "||", ";;", ";", "|&", "|", "&", "(", ")")
UNKNOWN = "\ue000"  # character in place of text that only a run of the script can yield
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class Token:
    kind: str  # `word`, `operator`, `newline`, `array`
    raw: str
    start: int
    end: int
    line: int
    items: list[Token] = field(default_factory=list)
    heredoc: tuple[str, bool] | None = None  # text, expanded


@dataclass(frozen=True, kw_only=True)
class Word:
    """Expanded word and its place in the text; `span` is None for a part of a longer word."""

    text: str
    line: int
    span: tuple[int, int] | None


Value = str | list[Word]


class Expansion:
    """Variables and arguments of a run, and the words that they yield."""

    def __init__(self, arguments: Sequence[str], variables: dict[str, Value]) -> None:
        self.arguments = list(arguments)
        self.variables = variables

    def words(self, token: Token) -> list[Word]:
        """Return the words of a token: unquoted variables are split, arrays yield one word each."""
        pieces = list(self._pieces(token.raw))
        words: list[list[tuple[str, Word | None]]] = [[]]
        started = False
        for value, quoted in pieces:
            if isinstance(value, list):
                for index, item in enumerate(value):
                    if index:
                        words.append([])
                    words[-1].append((item.text, item))
                started = started or bool(value)
            elif quoted:
                words[-1].append((value, None))
                started = True
            else:
                for index, part in enumerate(re.split(r"\s+", value)):
                    if index:
                        words.append([])
                    if part:
                        words[-1].append((part, None))
                        started = True
        found = []
        for parts in words:
            if not parts:
                continue
            alone = parts[0][1] if len(parts) == 1 else None
            if alone is not None and alone.span is not None:
                found.append(alone)
            else:
                whole = len([one for one in words if one]) == 1
                text = "".join(part for part, _ in parts)
                found.append(
                    Word(
                        text=text, line=token.line, span=(token.start, token.end) if whole else None
                    )
                )
        return found if started else []

    def joined(self, raw: str) -> str:
        return "".join(
            value if isinstance(value, str) else " ".join(one.text for one in value)
            for value, _ in self._pieces(raw)
        )

    def _pieces(self, raw: str, *, in_quotes: bool = False) -> Iterator[tuple[Value, bool]]:
        """Yield (value, quoted) for each part of a word, or of the text between two double
        quotes.
        """
        at, plain = 0, ""
        while at < len(raw):
            char, after = raw[at], raw[at + 1 : at + 2]
            found: list[tuple[Value, bool]]
            if char == "\\" and after and (not in_quotes or after in '"\\$`\n'):
                found, end = [] if after == "\n" else [(after, True)], at + 2
            elif char == "'" and not in_quotes:
                end = quote_end(raw, "'", at + 1, 1)
                found = [(raw[at + 1 : end - 1], True)]
            elif char == '"' and not in_quotes:
                end = double_quote_end(raw, at + 1, 1)
                found = list(self._pieces(raw[at + 1 : end - 1], in_quotes=True)) or [("", True)]
            elif char + after == "$'" and not in_quotes:
                end = quote_end(raw, "'", at + 2, 1)
                found = [(raw[at + 2 : end - 1].replace("\\n", "\n").replace("\\t", "\t"), True)]
            elif char in "$`":
                value, end = self._dollar(raw, at)
                found = [(value, in_quotes)]
            elif char == "~" and at == 0 and after in ("", "/") and not in_quotes:
                found, end = [(self.text("HOME"), True)], 1
            else:
                plain += char
                at += 1
                continue
            if plain:
                yield plain, in_quotes
                plain = ""
            yield from found
            at = end
        if plain:
            yield plain, in_quotes

    def _dollar(self, raw: str, at: int) -> tuple[Value, int]:
        """Return the value of `$...` at this offset, and the offset behind it."""
        if raw[at] == "`":
            end = quote_end(raw, "`", at + 1, 1)
            return self._output(raw[at + 1 : end - 1]), end
        following = raw[at + 1 : at + 2]
        if following in ("(", "{"):
            end = bracket_end(raw, at + 1, 1)
            if raw.startswith("$((", at):
                return self._arithmetic(raw[at + 3 : end - 2]), end
            inner = raw[at + 2 : end - 1]
            return self._output(inner) if following == "(" else self._braces(inner), end
        if following in ("@", "*") or following.isdigit():
            return self._argument(following), at + 2
        if following in ("#", "?", "$", "!", "-"):
            return (str(len(self.arguments)) if following == "#" else UNKNOWN), at + 2
        match = VARIABLE_NAME.match(raw, at + 1)
        if match is None:
            return "$", at + 1
        return self.text(match[0]), match.end()

    def _argument(self, name: str) -> Value:
        """Return `$@`, or one argument by its number."""
        if name.isdigit():
            return self.arguments[int(name) - 1] if 0 < int(name) <= len(self.arguments) else ""
        return [Word(text=one, line=1, span=None) for one in self.arguments]

    def _output(self, command: str) -> str:
        """Return what a command prints: `expr` is arithmetic, `pwd` the folder; every other
        command is not run.
        """
        name, _, rest = command.strip().partition(" ")
        if command.strip() == "pwd":
            return self.text("PWD")
        return (
            self._arithmetic(rest.replace("\\*", "*").replace("'*'", "*"))
            if name == "expr"
            else UNKNOWN
        )

    def _braces(self, inner: str) -> Value:
        """Return the value of `${inner}`."""
        if inner.startswith("#"):
            return str(len(self.text(inner[1:])))
        match = re.match(r"([A-Za-z_][A-Za-z0-9_]*|\d+|[@*])(\[(.*?)\])?", inner)
        if match is None:
            return UNKNOWN
        name, index, rest = match[1], match[3], inner[match.end() :]
        value: Value
        if name in "@*" or name.isdigit():
            value = self._argument(name)
        elif index in ("@", "*"):
            held = self.variables.get(name, [])
            value = held if isinstance(held, list) else [Word(text=held, line=1, span=None)]
        elif index is not None:
            held, place = self.variables.get(name, []), self._arithmetic(index)
            known = isinstance(held, list) and place.isdigit() and int(place) < len(held)
            value = held[int(place)].text if known and isinstance(held, list) else ""
        else:
            value = self.text(name)
        return self._modified(name, value, rest) if rest else value

    def _modified(self, name: str, value: Value, rest: str) -> Value:
        sliced = re.fullmatch(r":\s*(\d+)(?::\s*(\d+))?", rest)
        if sliced and isinstance(value, list):
            first = int(sliced[1]) - (1 if name in "@*" and int(sliced[1]) else 0)
            return value[first:][: int(sliced[2]) if sliced[2] else None]
        text = value if isinstance(value, str) else " ".join(one.text for one in value)
        is_set = (
            name in self.variables
            or (name.isdigit() and int(name) <= len(self.arguments))
            or bool(text)
        )
        for sign in (":-", ":=", ":+", ":?", "-", "=", "+", "?"):
            if rest.startswith(sign):
                other = rest[len(sign) :]
                given = bool(text) if sign.startswith(":") else is_set
                if sign.endswith("+"):
                    return self.joined(other) if given else ""
                if given:
                    return value
                result = self.joined(other)
                if sign.endswith("="):
                    self.variables[name] = result
                return UNKNOWN if sign.endswith("?") else result
        for sign, kind in (
            ("##", "longest"),
            ("#", "shortest"),
            ("%%", "longest"),
            ("%", "shortest"),
        ):
            if rest.startswith(sign):
                return _stripped(
                    text, self.joined(rest[len(sign) :]), sign[0] == "#", kind == "longest"
                )
        if rest.startswith("/"):
            whole = rest.startswith("//")
            old, _, new = rest[2 if whole else 1 :].partition("/")
            return text.replace(self.joined(old), self.joined(new), -1 if whole else 1)
        if rest in (",,", "^^"):
            return text.lower() if rest == ",," else text.upper()
        match = re.fullmatch(r":(\d+)(?::(\d+))?", rest)
        if match:
            return text[int(match[1]) :][: int(match[2]) if match[2] else None]
        return UNKNOWN

    def text(self, name: str) -> str:
        value = self.variables.get(name, "")
        return value if isinstance(value, str) else value[0].text if value else ""

    def _arithmetic(self, raw: str) -> str:
        names = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", raw)
        names = re.sub(
            r"\$(\d)", lambda one: (self.arguments + [""] * 9)[int(one[1]) - 1] or "0", names
        )
        known = VARIABLE_NAME.sub(lambda one: self.text(one[0]) or "0", names)
        try:
            return str(_whole_number(ast.parse(known.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError):
            return UNKNOWN


_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _whole_number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 2**63:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        result: int = _ARITHMETIC[type(node.op)](
            _whole_number(node.left), _whole_number(node.right)
        )
        if abs(result) < 2**63:
            return result
    raise ValueError("no whole-number arithmetic")


def _stripped(text: str, pattern: str, front: bool, longest: bool) -> str:
    lengths = range(len(text) + 1)
    for length in reversed(lengths) if longest else lengths:
        part = text[:length] if front else text[len(text) - length :]
        if fnmatch.fnmatchcase(part, pattern):
            return text[length:] if front else text[: len(text) - length]
    return text


def tokens_of(text: str, start: int = 0, closing: str = "") -> tuple[list[Token], int]:
    """Return the tokens of a script up to the closing bracket, and the offset behind them."""
    at, found = start, list[Token]()
    pending: list[tuple[Token, str, bool, bool]] = []
    while at < len(text):
        char = text[at]
        if len(found) > MAX_WORDS:
            raise BadInput(
                f"The script has more than {MAX_WORDS:,} words.", way_out="Give a launch script."
            )
        if char == closing:
            return found, at + 1
        if text.startswith("\\\n", at):
            at += 2
        elif char in " \t\r":
            at += 1
        elif char == "#":
            at = _end_of_line(text, at)
        elif char == "\n":
            found.append(Token("newline", "\n", at, at + 1, _line(text, at)))
            at += 1
            for token, word, quoted, tabs in pending:
                body, at = _heredoc(text, at, word, tabs)
                token.heredoc = (body, not quoted)
            pending = []
        elif match := _REDIRECTION.match(text, at):
            at = match.end()
            while at < len(text) and text[at] in " \t":
                at += 1
            end = _word_end(text, at)
            if match[2] in ("<<", "<<-") and found:
                raw = text[at:end]
                word = re.sub(r"['\"\\]", "", raw)
                pending.append((found[-1], word, raw != word, match[2] == "<<-"))
            at = end
        elif operator_ := next((one for one in _OPERATORS if text.startswith(one, at)), None):
            found.append(Token("operator", operator_, at, at + len(operator_), _line(text, at)))
            at += len(operator_)
        else:
            end = _word_end(text, at)
            raw = text[at:end]
            if ASSIGNMENT.fullmatch(raw) and end < len(text) and text[end] == "(":
                items, end = tokens_of(text, end + 1, ")")
                kept = [one for one in items if one.kind == "word"]
                found.append(Token("array", raw, at, end, _line(text, at), kept))
            else:
                found.append(Token("word", raw, at, end, _line(text, at)))
            at = max(end, at + 1)
    return found, at


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _word_end(text: str, at: int) -> int:
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char in "'`":
            at = quote_end(text, char, at + 1, _line(text, at))
        elif char == '"':
            at = double_quote_end(text, at + 1, _line(text, at))
        elif text.startswith("$'", at):
            at = quote_end(text, "'", at + 2, _line(text, at))
        elif text.startswith(("$(", "${"), at):
            at = bracket_end(text, at + 1, _line(text, at))
        elif char in " \t\r\n;|&()<>":
            return at
        else:
            at += 1
    return min(at, len(text))


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def quote_end(text: str, mark: str, at: int, line: int) -> int:
    """Return the offset behind the closing mark."""
    while True:
        end = text.find(mark, at)
        if end < 0:
            raise BadInput(f"line {line}: the quote {mark} is not closed.", way_out="Close it.")
        if mark == "'" or text[end - 1] != "\\":
            return end + 1
        at = end + 1


def double_quote_end(text: str, at: int, line: int) -> int:
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] == '"':
            return at + 1
        elif text.startswith(("$(", "${"), at):
            at = bracket_end(text, at + 1, line)
        else:
            at += 1
    raise BadInput(f'line {line}: the quote " is not closed.', way_out="Close it.")


def bracket_end(text: str, at: int, line: int) -> int:
    """Return the offset behind the bracket that closes the one at `at`."""
    opening = text[at]
    closing, depth = {"(": ")", "{": "}"}[opening], 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "'" and opening == "(":
            at = quote_end(text, "'", at + 1, line) - 1
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    raise BadInput(f"line {line}: {opening} is not closed.", way_out=f"Close it with {closing}.")


def _heredoc(text: str, at: int, word: str, tabs: bool) -> tuple[str, int]:
    body: list[str] = []
    while at < len(text):
        end = _end_of_line(text, at)
        line = text[at:end].lstrip("\t") if tabs else text[at:end]
        at = end + 1
        if line == word:
            break
        body.append(line)
    return "\n".join(body), at

"""Expansion of a shell script's words: variables, arrays, arithmetic, and what is unknown."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.core.shell_script.tokens import Token, bracket_end, double_quote_end, quote_end

UNKNOWN = "\ue000"  # character in place of text that only a run of the script can yield
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
                found.append(Word(text=text, line=token.line, span=(token.start, token.end) if whole else None))
        return found if started else []

    def joined(self, raw: str) -> str:
        return "".join(value if isinstance(value, str) else " ".join(one.text for one in value) for value, _ in self._pieces(raw))

    def _pieces(self, raw: str) -> Iterator[tuple[Value, bool]]:
        """Yield (value, quoted) for each part of a word."""
        at = 0
        plain = ""
        while at < len(raw):
            char = raw[at]
            if char == "\\" and at + 1 < len(raw):
                if plain:
                    yield plain, False
                    plain = ""
                if raw[at + 1] != "\n":
                    yield raw[at + 1], True
                at += 2
                continue
            if char not in "'\"$`":
                if char == "~" and at == 0 and not plain and (len(raw) == 1 or raw[1] == "/"):
                    yield self.text("HOME"), True
                else:
                    plain += char
                at += 1
                continue
            if plain:
                yield plain, False
                plain = ""
            if char == "'":
                end = quote_end(raw, "'", at + 1, 1)
                yield raw[at + 1 : end - 1], True
            elif char == '"':
                end = double_quote_end(raw, at + 1, 1)
                inner = list(self._in_double(raw[at + 1 : end - 1]))
                yield from inner or [("", True)]
            elif raw.startswith("$'", at):
                end = quote_end(raw, "'", at + 2, 1)
                yield raw[at + 2 : end - 1].replace("\\n", "\n").replace("\\t", "\t"), True
            else:
                value, end = self._dollar(raw, at)
                yield value, False
            at = end
        if plain:
            yield plain, False

    def _in_double(self, raw: str) -> Iterator[tuple[Value, bool]]:
        at, plain = 0, ""
        while at < len(raw):
            if raw[at] == "\\" and at + 1 < len(raw) and raw[at + 1] in '"\\$`\n':
                plain += "" if raw[at + 1] == "\n" else raw[at + 1]
                at += 2
            elif raw[at] in "$`":
                if plain:
                    yield plain, True
                    plain = ""
                value, at = self._dollar(raw, at)
                yield (value if isinstance(value, str) else list(value)), True
            else:
                plain += raw[at]
                at += 1
        if plain:
            yield plain, True

    def _dollar(self, raw: str, at: int) -> tuple[Value, int]:
        """Return the value of `$...` at this offset, and the offset behind it."""
        if raw[at] == "`":
            end = quote_end(raw, "`", at + 1, 1)
            return self._output(raw[at + 1 : end - 1]), end
        following = raw[at + 1 : at + 2]
        if raw.startswith("$((", at):
            end = bracket_end(raw, at + 1, 1)
            return self._arithmetic(raw[at + 3 : end - 2]), end
        if following == "(":
            end = bracket_end(raw, at + 1, 1)
            return self._output(raw[at + 2 : end - 1]), end
        if following == "{":
            end = bracket_end(raw, at + 1, 1)
            return self._braces(raw[at + 2 : end - 1]), end
        if following in ("@", "*"):
            return [Word(text=one, line=1, span=None) for one in self.arguments], at + 2
        if following.isdigit():
            index = int(following)
            return (self.arguments[index - 1] if 0 < index <= len(self.arguments) else ""), at + 2
        if following in ("#", "?", "$", "!", "-"):
            return (str(len(self.arguments)) if following == "#" else UNKNOWN), at + 2
        match = NAME.match(raw, at + 1)
        if match is None:
            return "$", at + 1
        return self.text(match[0]), match.end()

    def _output(self, command: str) -> str:
        """Return what a command prints: `expr` is arithmetic, `pwd` the folder; every other command is not run."""
        name, _, rest = command.strip().partition(" ")
        if command.strip() == "pwd":
            return self.text("PWD")
        return self._arithmetic(rest.replace("\\*", "*").replace("'*'", "*")) if name == "expr" else UNKNOWN

    def _braces(self, inner: str) -> Value:
        """Return the value of `${inner}`."""
        if inner.startswith("#"):
            return str(len(self.text(inner[1:])))
        match = re.match(r"([A-Za-z_][A-Za-z0-9_]*|\d+|[@*])(\[(.*?)\])?", inner)
        if match is None:
            return UNKNOWN
        name, index, rest = match[1], match[3], inner[match.end() :]
        value: Value
        if name in "@*":
            value = [Word(text=one, line=1, span=None) for one in self.arguments]
        elif name.isdigit():
            value = self.arguments[int(name) - 1] if 0 < int(name) <= len(self.arguments) else ""
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
        is_set = name in self.variables or (name.isdigit() and int(name) <= len(self.arguments)) or bool(text)
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
        for sign, kind in (("##", "longest"), ("#", "shortest"), ("%%", "longest"), ("%", "shortest")):
            if rest.startswith(sign):
                return _stripped(text, self.joined(rest[len(sign) :]), sign[0] == "#", kind == "longest")
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
        names = re.sub(r"\$(\d)", lambda one: (self.arguments + [""] * 9)[int(one[1]) - 1] or "0", names)
        known = NAME.sub(lambda one: self.text(one[0]) or "0", names)
        try:
            return str(_whole_number(ast.parse(known.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError):
            return UNKNOWN


_ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def _whole_number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 2**63:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        result: int = _ARITHMETIC[type(node.op)](_whole_number(node.left), _whole_number(node.right))
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

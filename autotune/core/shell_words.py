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


def value_text(value: Value) -> str:
    """Return a value as one text; the words of an array are joined."""
    if isinstance(value, str):
        return value
    return " ".join(word.text for word in value)


class Expansion:
    """Variables and arguments of a run, and the words that they yield."""

    def __init__(self, arguments: Sequence[str], variables: dict[str, Value]) -> None:
        self.arguments = list(arguments)
        self.variables = variables

    def words(self, token: Token) -> list[Word]:
        """Return the words of a token: unquoted variables are split, arrays yield one word each."""
        pieces = list(self._pieces(token.raw))
        parts_by_word: list[list[tuple[str, Word | None]]] = [[]]
        started = False
        for value, quoted in pieces:
            if isinstance(value, list):
                for index, item in enumerate(value):
                    if index:
                        parts_by_word.append([])
                    parts_by_word[-1].append((item.text, item))
                started = started or bool(value)
            elif quoted:
                parts_by_word[-1].append((value, None))
                started = True
            else:
                for index, part in enumerate(re.split(r"\s+", value)):
                    if index:
                        parts_by_word.append([])
                    if part:
                        parts_by_word[-1].append((part, None))
                        started = True
        expanded = []
        for parts in parts_by_word:
            if not parts:
                continue
            only_part = parts[0][1] if len(parts) == 1 else None
            if only_part is not None and only_part.span is not None:
                expanded.append(only_part)
            else:
                is_one_word = len([word for word in parts_by_word if word]) == 1
                text = "".join(part for part, _ in parts)
                expanded.append(
                    Word(
                        text=text,
                        line=token.line,
                        span=(token.start, token.end) if is_one_word else None,
                    )
                )
        return expanded if started else []

    def joined(self, raw: str) -> str:
        return "".join(value_text(value) for value, _ in self._pieces(raw))

    def _pieces(self, raw: str, *, in_quotes: bool = False) -> Iterator[tuple[Value, bool]]:
        """Yield (value, quoted) for each part of a word, or of the text between two double
        quotes.
        """
        at, plain = 0, ""
        while at < len(raw):
            char, after = raw[at], raw[at + 1 : at + 2]
            pieces: list[tuple[Value, bool]]
            if char == "\\" and after and (not in_quotes or after in '"\\$`\n'):
                pieces, end = [] if after == "\n" else [(after, True)], at + 2
            elif char == "'" and not in_quotes:
                end = quote_end(raw, "'", at + 1, 1)
                pieces = [(raw[at + 1 : end - 1], True)]
            elif char == '"' and not in_quotes:
                end = double_quote_end(raw, at + 1, 1)
                pieces = list(self._pieces(raw[at + 1 : end - 1], in_quotes=True)) or [("", True)]
            elif char + after == "$'" and not in_quotes:
                end = quote_end(raw, "'", at + 2, 1)
                pieces = [(raw[at + 2 : end - 1].replace("\\n", "\n").replace("\\t", "\t"), True)]
            elif char in "$`":
                value, end = self._dollar(raw, at)
                pieces = [(value, in_quotes)]
            elif char == "~" and at == 0 and after in ("", "/") and not in_quotes:
                pieces, end = [(self.text("HOME"), True)], 1
            else:
                plain += char
                at += 1
                continue
            if plain:
                yield plain, in_quotes
                plain = ""
            yield from pieces
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
        return [Word(text=argument, line=1, span=None) for argument in self.arguments]

    def _output(self, command: str) -> str:
        """Return what a command prints: `expr` is arithmetic, `pwd` the folder; every other
        command is not run.
        """
        name, _, expression = command.strip().partition(" ")
        if command.strip() == "pwd":
            return self.text("PWD")
        if name != "expr":
            return UNKNOWN
        return self._arithmetic(expression.replace("\\*", "*").replace("'*'", "*"))

    def _braces(self, inner: str) -> Value:
        """Return the value of `${inner}`."""
        if inner.startswith("#"):
            return str(len(self.text(inner[1:])))
        match = re.match(r"([A-Za-z_][A-Za-z0-9_]*|\d+|[@*])(\[(.*?)\])?", inner)
        if match is None:
            return UNKNOWN
        name, index, modifier = match[1], match[3], inner[match.end() :]
        value: Value
        if name in "@*" or name.isdigit():
            value = self._argument(name)
        elif index in ("@", "*"):
            variable = self.variables.get(name, [])
            value = (
                variable if isinstance(variable, list) else [Word(text=variable, line=1, span=None)]
            )
        elif index is not None:
            variable, place = self.variables.get(name, []), self._arithmetic(index)
            has_place = (
                isinstance(variable, list) and place.isdigit() and int(place) < len(variable)
            )
            value = variable[int(place)].text if has_place and isinstance(variable, list) else ""
        else:
            value = self.text(name)
        return self._modified(name, value, modifier) if modifier else value

    def _modified(self, name: str, value: Value, modifier: str) -> Value:
        sliced = re.fullmatch(r":\s*(\d+)(?::\s*(\d+))?", modifier)
        if sliced and isinstance(value, list):
            first = int(sliced[1]) - (1 if name in "@*" and int(sliced[1]) else 0)
            return value[first:][: int(sliced[2]) if sliced[2] else None]
        text = value_text(value)
        is_set = (
            name in self.variables
            or (name.isdigit() and int(name) <= len(self.arguments))
            or bool(text)
        )
        for sign in (":-", ":=", ":+", ":?", "-", "=", "+", "?"):
            if modifier.startswith(sign):
                alternative = modifier[len(sign) :]
                applies = bool(text) if sign.startswith(":") else is_set
                if sign.endswith("+"):
                    return self.joined(alternative) if applies else ""
                if applies:
                    return value
                result = self.joined(alternative)
                if sign.endswith("="):
                    self.variables[name] = result
                return UNKNOWN if sign.endswith("?") else result
        for sign in ("##", "#", "%%", "%"):
            if modifier.startswith(sign):
                pattern = self.joined(modifier[len(sign) :])
                return _stripped(text, pattern, front=sign[0] == "#", longest=len(sign) == 2)
        if modifier.startswith("/"):
            everywhere = modifier.startswith("//")
            old, _, new = modifier[2 if everywhere else 1 :].partition("/")
            return text.replace(self.joined(old), self.joined(new), -1 if everywhere else 1)
        if modifier in (",,", "^^"):
            return text.lower() if modifier == ",," else text.upper()
        match = re.fullmatch(r":(\d+)(?::(\d+))?", modifier)
        if match:
            return text[int(match[1]) :][: int(match[2]) if match[2] else None]
        return UNKNOWN

    def text(self, name: str) -> str:
        value = self.variables.get(name, "")
        if isinstance(value, str):
            return value
        return value[0].text if value else ""

    def _arithmetic(self, raw: str) -> str:
        names = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", raw)
        names = re.sub(
            r"\$(\d)", lambda match: (self.arguments + [""] * 9)[int(match[1]) - 1] or "0", names
        )
        expression = VARIABLE_NAME.sub(lambda match: self.text(match[0]) or "0", names)
        try:
            return str(_whole_number(ast.parse(expression.strip(), mode="eval").body))
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


def _stripped(text: str, pattern: str, *, front: bool, longest: bool) -> str:
    lengths = range(len(text) + 1)
    for length in reversed(lengths) if longest else lengths:
        part = text[:length] if front else text[len(text) - length :]
        if fnmatch.fnmatchcase(part, pattern):
            return text[length:] if front else text[: len(text) - length]
    return text


def tokens_of(text: str, start: int = 0, closing: str = "") -> tuple[list[Token], int]:
    """Return the tokens of a script up to the closing bracket, and the offset behind them."""
    at, tokens = start, list[Token]()
    pending: list[tuple[Token, str, bool, bool]] = []
    while at < len(text):
        char = text[at]
        if len(tokens) > MAX_WORDS:
            raise BadInput(
                f"The script has more than {MAX_WORDS:,} words.", way_out="Give a launch script."
            )
        if char == closing:
            return tokens, at + 1
        if text.startswith("\\\n", at):
            at += 2
        elif char in " \t\r":
            at += 1
        elif char == "#":
            at = _end_of_line(text, at)
        elif char == "\n":
            tokens.append(Token("newline", "\n", at, at + 1, _line(text, at)))
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
            if match[2] in ("<<", "<<-") and tokens:
                raw = text[at:end]
                word = re.sub(r"['\"\\]", "", raw)
                pending.append((tokens[-1], word, raw != word, match[2] == "<<-"))
            at = end
        elif operator_ := next(
            (candidate for candidate in _OPERATORS if text.startswith(candidate, at)), None
        ):
            tokens.append(Token("operator", operator_, at, at + len(operator_), _line(text, at)))
            at += len(operator_)
        else:
            end = _word_end(text, at)
            raw = text[at:end]
            if ASSIGNMENT.fullmatch(raw) and end < len(text) and text[end] == "(":
                items, end = tokens_of(text, end + 1, ")")
                elements = [item for item in items if item.kind == "word"]
                tokens.append(Token("array", raw, at, end, _line(text, at), elements))
            else:
                tokens.append(Token("word", raw, at, end, _line(text, at)))
            at = max(end, at + 1)
    return tokens, at


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

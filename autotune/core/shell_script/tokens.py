"""Tokens of a shell script: words with their quotes, operators, arrays and here-documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autotune.core.errors import BadInput

MAX_WORDS = 100_000
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)")
_REDIRECTION = re.compile(r"(\d*)(<<<|<<-?|>>|>&|<&|&>>?|>\||>|<)")
_OPERATORS = ("&&", "||", ";;", ";", "|&", "|", "&", "(", ")")


@dataclass
class Token:
    kind: str  # `word`, `operator`, `newline`, `array`
    raw: str
    start: int
    end: int
    line: int
    items: list[Token] = field(default_factory=list)
    heredoc: tuple[str, bool] | None = None  # text, expanded


def tokens_of(text: str, start: int = 0, closing: str = "") -> tuple[list[Token], int]:
    """Return the tokens of a script up to the closing bracket, and the offset behind them."""
    at, found = start, list[Token]()
    pending: list[tuple[Token, str, bool, bool]] = []
    while at < len(text):
        char = text[at]
        if len(found) > MAX_WORDS:
            raise BadInput(f"The script has more than {MAX_WORDS:,} words.", way_out="Give a launch script.")
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
        elif char == "'":
            at = quote_end(text, "'", at + 1, _line(text, at))
        elif char == '"':
            at = double_quote_end(text, at + 1, _line(text, at))
        elif text.startswith("$'", at):
            at = quote_end(text, "'", at + 2, _line(text, at))
        elif char == "$" and at + 1 < len(text) and text[at + 1] in "({":
            at = bracket_end(text, at + 1, _line(text, at))
        elif char == "`":
            at = quote_end(text, "`", at + 1, _line(text, at))
        elif char in " \t\r\n;|&()<>":
            return at
        else:
            at += 1
    return min(at, len(text))


def simple_commands(tokens: Sequence[Token]) -> Iterator[tuple[list[Token], str]]:
    """Yield the tokens between operators, with the operator that follows."""
    current: list[Token] = []
    for token in tokens:
        if token.kind in ("operator", "newline"):
            if current or token.raw in ("&&", "||"):
                yield current, token.raw
            current = []
        else:
            current.append(token)
    if current:
        yield current, ""


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
        elif text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
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
        line = text[at:end]
        at = end + 1
        if (line.lstrip("\t") if tabs else line) == word:
            break
        body.append(line.lstrip("\t") if tabs else line)
    return "\n".join(body), at

"""Ends of quotes and brackets in the text of a shell script, words that braces expand to, and texts
without what a pattern matches.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Sequence

_BRACE = re.compile(
    r"\{(?:(?P<first>-?[0-9]{1,6})\.\.(?P<last>-?[0-9]{1,6})"
    r"|(?P<items>[^{}\s'\"$`\\,]*(?:,[^{}\s'\"$`\\,]*)+))\}"
)
MAX_BRACES = 1000  # words that the braces of one word may yield


def brace_expanded(raw: str) -> list[str]:
    """Return the words of `a{1..3}` and `{x,y}`; braces in quotes and in `${...}` stay."""
    if "{" not in raw or re.search(r"['\"$`\\]", raw):
        return [raw]
    parts: list[Sequence[str]] = []  # literal text and choices, alternating
    count = 1
    place = 0
    for match in _BRACE.finditer(raw):
        choices = _choices(match)
        count *= len(choices)
        if count > MAX_BRACES:
            return [raw]
        parts += [[raw[place : match.start()]], choices]
        place = match.end()
    parts.append([raw[place:]])
    return ["".join(combination) for combination in itertools.product(*parts)]


def _choices(match: re.Match[str]) -> Sequence[str]:
    if match["items"] is not None:
        return match["items"].split(",")
    first = int(match["first"])
    last = int(match["last"])
    step = 1 if last >= first else -1
    numbers = range(first, last + step, step)
    if len(numbers) > MAX_BRACES:
        return ["", *[""] * MAX_BRACES]
    return [str(number) for number in numbers]


class NotClosed(Exception):
    """A quote or bracket without its end."""

    def __init__(self, mark: str) -> None:
        super().__init__(mark)
        self.mark = mark


def quote_end(
    text: str,
    mark: str,
    place: int,
) -> int:
    """Return the offset behind the closing mark."""
    while True:
        end = text.find(mark, place)
        if end < 0:
            raise NotClosed(mark)
        if mark == "'" or text[end - 1] != "\\":
            return end + 1
        place = end + 1


def escaped_quote_end(text: str, place: int) -> int:
    """Return the offset behind the end of `$'...'`, in which a backslash keeps a quote."""
    while place < len(text):
        if text[place] == "\\":
            place += 1
        elif text[place] == "'":
            return place + 1
        place += 1
    raise NotClosed("'")


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b", "a": "\a", "b": "\b"}


def unescaped(text: str) -> str:
    """Return the text between the quotes of `$'...'`."""
    return re.sub(
        r"\\(.)",
        lambda match: _ESCAPES.get(match[1], match[1]),
        text,
        flags=re.DOTALL,
    )


def double_quote_end(text: str, place: int) -> int:
    while place < len(text):
        if text[place] == "\\":
            place += 2
        elif text[place] == '"':
            return place + 1
        elif text.startswith(("$(", "${"), place):
            place = bracket_end(text, place + 1)
        else:
            place += 1
    raise NotClosed('"')


def bracket_end(text: str, place: int) -> int:
    """Return the offset behind the bracket that closes the one here.

    Inside `${...}` only another `${` opens one: `${A:-one of {x, y\\}}` ends at the last bracket.
    """
    opening = text[place]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    while place < len(text):
        char = text[place]
        if char == "\\":
            place += 1
        elif char == "'" and opening == "(":
            place = quote_end(text, "'", place + 1) - 1
        elif char == '"' and opening == "(":
            place = double_quote_end(text, place + 1) - 1
        elif char == opening and (opening == "(" or not depth or text[place - 1] == "$"):
            depth += 1
        elif char == closing:
            depth -= 1
            if not depth:
                return place + 1
        place += 1
    raise NotClosed(opening)


def stripped(
    text: str,
    pattern: str,
    *,
    at_front: bool,
    longest: bool,
) -> str:
    """Return the text without the part at one end that matches the pattern."""
    lengths = range(len(text) + 1)
    for length in reversed(lengths) if longest else lengths:
        if at_front:
            part, remainder = text[:length], text[length:]
        else:
            cut = len(text) - length
            part, remainder = text[cut:], text[:cut]
        if fnmatch.fnmatchcase(part, pattern):
            return remainder
    return text

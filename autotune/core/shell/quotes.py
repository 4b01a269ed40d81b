"""Ends of quotes and brackets in the text of a shell script."""

from __future__ import annotations

import re


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


def escaped_quote_end(
    text: str,
    place: int,
) -> int:
    """Return the offset behind the end of `$'...'`, in which a backslash keeps a quote."""
    while place < len(text):
        if text[place] == "\\":
            place += 1
        elif text[place] == "'":
            return place + 1
        place += 1
    raise NotClosed("'")


_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "e": "\x1b",
    "E": "\x1b",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "\\": "\\",
}
_QUOTES = "'\"?"  # whose backslash goes in `$'...'` and in a template, not for `echo -e`
_ESCAPE = re.compile(
    r"\\(?:x(?P<hex>[0-9a-fA-F]{1,2})|u(?P<code>[0-9a-fA-F]{1,4})"
    r"|(?P<octal>[0-7]{1,3})|(?P<char>.))",
    re.DOTALL,
)


def unescaped(text: str) -> str:
    """Return the text between the quotes of `$'...'`, or of a template of `printf`."""
    return _ESCAPE.sub(_character, text)


_ESCAPE_OF_ECHO = re.compile(r"\\0(?P<octal>[0-7]{0,3})|\\[0-7'\"?]")


def unescaped_by_echo(text: str) -> str:
    """Return what `echo -e` and `%b` of `printf` print. Raises ValueError for `\\c`."""
    printed: list[str] = []
    place = 0
    for match in re.finditer(r"\\.", text, re.DOTALL):
        if match.start() < place:
            continue
        if match[0] == "\\c":
            raise ValueError("the output ends at a backslash and a `c`")
        of_echo = _ESCAPE_OF_ECHO.match(text, match.start())
        escape = of_echo or _ESCAPE.match(text, match.start())
        assert escape is not None
        printed.append(text[place : match.start()])
        place = escape.end()
        if of_echo is None:
            printed.append(_character(escape))
        elif of_echo["octal"] is not None:
            printed.append(chr(int(of_echo["octal"] or "0", 8) % 256))
        else:
            printed.append(of_echo[0])
    printed.append(text[place:])
    return "".join(printed)


def _character(match: re.Match[str]) -> str:
    code = match["hex"] or match["code"]
    if code is not None:
        return chr(int(code, 16))
    if match["octal"] is not None:
        return chr(int(match["octal"], 8) % 256)
    char = match["char"]
    if char in _QUOTES:
        return char
    return _ESCAPES.get(char, match[0])


def without_escapes(text: str) -> str:
    """Return the text between backquotes, in which a backslash keeps three characters."""
    return re.sub(r"\\([`\\$])", r"\1", text)


def double_quote_end(
    text: str,
    place: int,
) -> int:
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


def bracket_end(
    text: str,
    place: int,
) -> int:
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


def place_behind(
    text: str,
    place: int,
) -> int:
    """Return the offset behind one character, escaped character, quoted text or expansion."""
    char = text[place]
    if char == "\\":
        return place + 2
    if char in "'`":
        return quote_end(text, char, place + 1)
    if char == '"':
        return double_quote_end(text, place + 1)
    if text.startswith(("$(", "${"), place):
        return bracket_end(text, place + 1)
    return place + 1

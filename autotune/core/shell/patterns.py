"""Patterns in a shell script: `case` and `[[ A == B* ]]`, `${NAME#old}`, `${NAME/old/new}`."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from autotune.core.shell.extended_patterns import (
    LONGEST_EXTENDED,
    Matcher,
    extended_matcher,
    is_extended,
)

MAX_STARS = 2
"""Stars of a pattern whose search takes time in proportion to the text."""

_SPECIAL = re.compile(r"[*?\[]")
_PART = re.compile(r"\[(?P<sign>[!^]?)(?P<characters>[\w., :/-]+)\]|(?P<character>.)", re.DOTALL)

CHARACTER_CLASSES = {
    "[:digit:]": "0-9",
    "[:upper:]": "A-Z",
    "[:lower:]": "a-z",
    "[:alpha:]": "a-zA-Z",
    "[:alnum:]": "a-zA-Z0-9",
    "[:space:]": " \t\n\r\f\v",
}
"""Class of characters inside of brackets -> its characters."""

_OTHER_CLASS = re.compile(r"\[:")


def matcher_of(
    pattern: str,
    *,
    has_extended: bool,
    longest_text: int,
) -> Matcher | None:
    """Return the test of a text, None for a pattern that is not interpreted.

    `has_extended`: bash reads `+(a|b)` as a pattern, by `shopt -s extglob`.
    """
    spelled = _plain_pattern(pattern)
    if _OTHER_CLASS.search(spelled):
        return None
    if is_extended(spelled):
        if not has_extended or longest_text > LONGEST_EXTENDED:
            return None
        return extended_matcher(spelled)
    return lambda text: fnmatch.fnmatchcase(text, spelled)


def matches_pattern(
    text: str,
    pattern: str,
    *,
    has_extended: bool,
) -> bool | None:
    """Return whether the text matches, None for a pattern that is not interpreted."""
    matches = matcher_of(pattern, has_extended=has_extended, longest_text=len(text))
    return None if matches is None else matches(text)


def literal_pattern(text: str) -> str:
    """Return the pattern that only this text matches."""
    return re.sub(r"([*?\[])", r"[\1]", text)


def _plain_pattern(pattern: str) -> str:
    """Return the pattern in Python's spelling."""
    for name, characters in CHARACTER_CLASSES.items():
        pattern = pattern.replace(name, characters)
    return pattern.replace("[^", "[!")


def stripped(
    text: str,
    matches: Matcher,
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
        if matches(part):
            return remainder
    return text


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """`/old/new`, `//old/new` everywhere, `/#old/new` at the front and `/%old/new` at the end."""

    old: str
    new: str
    place: str  # "/", "#", "%", or empty for the first one

    @property
    def is_literal(self) -> bool:
        """Quoted stars and brackets are characters."""
        return any(mark in self.old for mark in "'\"\\")


def replacement(operation: str) -> Replacement:
    """Return the parts of an operation that begins with a slash."""
    place = operation[1:2]
    if place not in ("/", "#", "%"):
        place = ""
    text = operation[1 + len(place) :]
    end = _pattern_end(text)
    return Replacement(
        old=text[:end],
        new=text[end + 1 :],
        place=place,
    )


def _pattern_end(text: str) -> int:
    """Return the place of the slash behind the pattern: of two slashes, the second ends `/`."""
    for match in re.finditer(r"\\.|'[^']*'|\"[^\"]*\"|\$\{[^}]*\}|/", text, re.DOTALL):
        if match[0] == "/":
            return match.start() + (match.start() == 0 and text[1:2] == "/")
    return len(text)


def replaced_text(
    text: str,
    change: Replacement,
    pattern: str,
    new: str,
) -> str | None:
    """Return the text after the replacement of an expanded pattern; None: it is not read."""
    if not pattern:
        return {"#": f"{new}{text}", "%": f"{text}{new}"}.get(change.place, text)
    expression: str | None = re.escape(pattern)
    if not change.is_literal:
        expression = _expression(pattern)
    elif _SPECIAL.search(change.old):
        return None
    if expression is None:
        return None
    anchors = {"#": f"^(?:{expression})", "%": f"(?:{expression})$"}
    searched = re.compile(anchors.get(change.place, expression), re.DOTALL)
    is_everywhere = change.place == "/"
    return searched.sub(lambda match: new, text, count=not is_everywhere)


def _expression(pattern: str) -> str | None:
    """Return the regular expression of a pattern with `*`, `?` and `[...]`."""
    if pattern.count("*") > MAX_STARS:
        return None
    expression = ""
    for match in _PART.finditer(pattern):
        character = match["character"]
        if character is None:
            sign = match["sign"].replace("!", "^")
            expression += f"[{sign}{match['characters']}]"
        elif character in "[(":
            return None
        else:
            expression += {"*": ".*", "?": "."}.get(character, re.escape(character))
    return expression

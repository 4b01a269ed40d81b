"""Patterns of `shopt -s extglob`: `@(a|b)`, `?(a)`, `*(a)`, `+(a)`, and `!(a)` by itself."""

from __future__ import annotations

import re
from collections.abc import Callable

Matcher = Callable[[str], bool]

LONGEST_EXTENDED = 100  # characters that such a pattern looks at
MAX_REPEATS = 3

_GROUP = re.compile(r"[@?*+!]\(")
_NEGATED = re.compile(r"!\((?P<inner>[^()]*)\)")
_PIECE = re.compile(
    r"(?P<sign>[@?*+])\((?P<group>[^()]*)\)"
    r"|\[(?P<not>[!^]?)(?P<characters>[\w., :/-]+)\]|(?P<character>.)",
    re.DOTALL,
)
_REPEATS = {"@": "", "?": "?", "*": "*", "+": "+"}


def is_extended(pattern: str) -> bool:
    return _GROUP.search(pattern) is not None


def extended_matcher(pattern: str) -> Matcher | None:
    """Return the test of a text; None for a pattern that is not read."""
    negated = _NEGATED.fullmatch(pattern)
    if negated is not None:
        pattern = negated["inner"]
    expression = _expression(pattern)
    if expression is None:
        return None
    compiled = re.compile(expression, re.DOTALL)

    def matches(text: str) -> bool:
        return (compiled.fullmatch(text) is not None) is (negated is None)

    return matches


def _expression(pattern: str) -> str | None:
    """Return the regular expression of a pattern, whose alternatives stand in `|` outside groups
    too: those of a negated one.
    """
    alternatives = []
    for alternative in _alternatives(pattern):
        parts = _parts(alternative)
        if parts is None:
            return None
        alternatives.append("".join(parts))
    return "|".join(alternatives)


def _parts(alternative: str) -> list[str] | None:
    parts: list[str] = []
    repeats = 0
    for match in _PIECE.finditer(alternative):
        part = _part(match)
        if part is None:
            return None
        repeats += part.endswith(("*", "+"))
        parts.append(part)
    if repeats > MAX_REPEATS:
        return None
    return parts


def _alternatives(pattern: str) -> list[str]:
    return re.split(r"\|(?![^()]*\))", pattern)


def _part(match: re.Match[str]) -> str | None:
    if match["sign"]:
        texts = match["group"].split("|")
        inner = [_plain_part(text) for text in texts]
        if None in inner:
            return None
        repeats = _REPEATS[match["sign"]] in ("*", "+")
        if repeats and not _are_apart(texts):
            return None
        joined = "|".join(text for text in inner if text is not None)
        return f"(?:{joined}){_REPEATS[match['sign']]}"
    if match["characters"]:
        return _bracket(match)
    character = match["character"]
    if character in "[()|!":
        return None
    return {"*": ".*", "?": "."}.get(character, re.escape(character))


def _are_apart(texts: list[str]) -> bool:
    """Return True unless a text may be repeated in two ways, whose search takes long."""
    if len(texts) == 1:
        return texts[0] != ""
    return not any("[" in text for text in texts) and no_text_begins_another(texts)


def no_text_begins_another(texts: list[str]) -> bool:
    for place, text in enumerate(texts):
        following = texts[:place] + texts[place + 1 :]
        if not text or any(candidate.startswith(text) for candidate in following):
            return False
    return True


def _plain_part(text: str) -> str | None:
    """Return the expression of an alternative in a group, which has no star."""
    expression = ""
    for match in _PIECE.finditer(text):
        if match["characters"]:
            expression += _bracket(match)
        elif match["character"] in (*"*?[()", None):
            return None
        else:
            expression += re.escape(match["character"])
    return expression


def _bracket(match: re.Match[str]) -> str:
    sign = match["not"].replace("!", "^")
    return f"[{sign}{match['characters']}]"

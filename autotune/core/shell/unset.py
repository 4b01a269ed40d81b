"""Marks in an expanded text where a variable has no value: they mark the word that lacks it.

A mark is the name between two characters of Unicode's private area. It travels with the text
through assigned variables, `ARGS="--lr $LR --beta 0"`, until words are made of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_OPENING, _CLOSING = "\ue001", "\ue002"
_MARK = re.compile(f"{_OPENING}([^{_CLOSING}]*){_CLOSING}")


def mark_of(name: str) -> str:
    return f"{_OPENING}{name}{_CLOSING}"


def plain(text: str) -> str:
    """Return the text as bash has it, where a variable without a value is empty."""
    return _MARK.sub("", text) if _OPENING in text else text


def names_in(text: str) -> tuple[str, ...]:
    """Return the variables without a value, each once."""
    return tuple(dict.fromkeys(_MARK.findall(text))) if _OPENING in text else ()


def with_marks(text: str, names: Iterable[str]) -> str:
    """Return a program's output with marks of the variables that it rests on, before its end."""
    marks = "".join(mark_of(name) for name in dict.fromkeys(names))
    if not marks:
        return text
    lines = text.rstrip("\n")
    return f"{lines}{marks}{text[len(lines) :]}"


def with_references(text: str) -> str:
    """Return the text for another shell, which has no value for them either."""
    return _MARK.sub(r"${\1}", text)

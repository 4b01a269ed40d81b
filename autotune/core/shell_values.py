"""Values of a shell's variables, and the words that they yield."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

UNKNOWN = "\ue000"  # character in place of text that only a run of the script can yield

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Word:
    """Expanded word and its place in the text; `span` is None for a part of a longer word."""

    text: str
    line: int
    span: tuple[int, int] | None
    unset: tuple[str, ...] = ()  # variables without a value, empty in the text
    missing: tuple[str, ...] = ()  # those that would have been the words behind it
    for_shell: str = ""  # the text with references to them; empty: there are none


Value: TypeAlias = str | list[Word] | dict[str, str]


@dataclass
class Piece:
    """Part of a word: its value, and whether quotes keep its blanks."""

    value: str | list[Word]
    quoted: bool


def items_of(value: Value) -> list[Word]:
    if isinstance(value, list):
        return value
    texts = value.values() if isinstance(value, dict) else [value]
    return [
        Word(
            text=text,
            line=1,
            span=None,
        )
        for text in texts
    ]


def joined_text(items: Sequence[Word]) -> str:
    return " ".join(item.text for item in items)

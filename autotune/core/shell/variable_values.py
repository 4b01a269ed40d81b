"""Values of a shell's variables, and the words that they yield."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autotune.core.shell.unknown_texts import UnknownTexts
from autotune.core.shell.unset import plain

UNKNOWN = "\ue000"  # character in place of text that only a run of the script can yield

BLANKS = " \t\n"  # at which words are split unless `IFS` says otherwise

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
    unknown: UnknownTexts = ()  # why the text has parts that are not known


Value: TypeAlias = str | list[Word] | dict[str, str]


@dataclass(frozen=True)
class Alternative:
    """Text in place of a variable without a value, as it is written: `"a b"` of `${A:-"a b"}`."""

    raw: str


@dataclass
class Piece:
    """Part of a word: its value, and whether quotes keep its blanks."""

    value: str | list[Word]
    quoted: bool


def items_of(value: Value) -> list[Word]:
    if isinstance(value, list):
        return value
    if isinstance(value, str):
        return words_from([value])
    if all(key.isdigit() for key in value):
        value = dict(sorted(value.items(), key=lambda item: int(item[0])))
    return words_from(value.values())


def words_from(texts: Iterable[str]) -> list[Word]:
    """Return words that have no place in the script."""
    return [
        Word(
            text=text,
            line=1,
            span=None,
        )
        for text in texts
    ]


def as_text(value: Value) -> str:
    """Return a value as a program receives it."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return plain(" ".join(value.values()))
    return joined_text(value)


def joined_text(items: Sequence[Word]) -> str:
    return " ".join(item.text for item in items)


def fields_of(
    text: str,
    separators: str,
    largest_count: int = 0,
) -> list[str]:
    """Return the parts of a text between separators; blanks beside one belong to it.

    `largest_count`: the last of so many parts is not split any further; 0: all are.
    """
    blanks = re.escape("".join(char for char in separators if char in BLANKS))
    signs = re.escape("".join(char for char in separators if char not in BLANKS))
    patterns = []
    if signs and blanks:
        patterns.append(f"[{blanks}]*[{signs}][{blanks}]*")
    elif signs:
        patterns.append(f"[{signs}]")
    if blanks:
        patterns.append(f"[{blanks}]+")
    if not patterns:
        return [text]
    return re.split("|".join(patterns), text, maxsplit=max(0, largest_count - 1))

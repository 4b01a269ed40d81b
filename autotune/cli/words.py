"""Words for a terminal as wide as it is; into a pipe or a file as they are, for programs to read."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

import click

NARROWEST = 60
"""Below this nothing is laid out any narrower."""

_UNKNOWN = 80


def room(stream: TextIO) -> int | None:
    """The terminal's columns; None where there is no terminal. COLUMNS outranks what the terminal says, as everywhere."""
    if not stream.isatty():
        return None
    named = os.environ.get("COLUMNS", "")
    if named.isdigit() and int(named) > 0:
        return max(NARROWEST, int(named))
    try:
        found = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        found = 0
    return max(NARROWEST, found or _UNKNOWN)


def wrapped(text: str, columns: int | None, *, indent: str = "") -> str:
    """No line wider than the columns; as it is where there are none to keep to."""
    if columns is None:
        return indent + text
    return "\n".join(
        textwrap.fill(
            line, columns, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False
        )
        for line in text.split("\n")
    )


def say(text: str, stream: TextIO | None = None) -> None:
    """A sentence on stdout, or on the stream that is named."""
    where = stream or sys.stdout
    print(wrapped(text, room(where)), file=where)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns aligned by spaces: rich would take longer to import than all the rest of a command.

    What the terminal has no room for stands below each row, by name, so that nothing is lost on a narrow one.
    """
    cells = [list(columns), *([str(value) for value in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    wide = room(sys.stdout)
    beside = [index for index in range(len(widths)) if wide is None or sum(widths[: index + 1]) + 2 * index <= wide] or [0]
    below = [index for index in range(len(widths)) if index not in beside]
    for number, row in enumerate(cells):
        print("  ".join(row[index].ljust(widths[index]) for index in beside).rstrip())
        if below and number:
            print(wrapped("; ".join(f"{columns[index]}: {row[index]}" for index in below), wide, indent="    "))


class Formatter(click.HelpFormatter):
    """Help in which lines to copy, too, stay within the terminal: they go on behind a backslash, as a shell reads it."""

    def write_text(self, text: str) -> None:
        wide = max(self.width - self.current_indent, 30)
        super().write_text("\n\n".join(_folded(paragraph, wide) for paragraph in text.split("\n\n")))


class Context(click.Context):
    formatter_class = Formatter


def _folded(paragraph: str, wide: int) -> str:
    """A paragraph that click leaves as it is, because a line `\\b` comes first."""
    lines = paragraph.split("\n")
    if lines[0].strip() != "\b":
        return paragraph
    return "\n".join(["\b", *(piece for line in lines[1:] for piece in _pieces(line, wide))])


def _pieces(line: str, wide: int) -> list[str]:
    if len(line) <= wide:
        return [line]
    indent = re.match(r" *", line)[0]  # type: ignore[index]
    command, _, comment = line.partition("  # ")
    if comment:
        return [*_pieces(f"{indent}# {comment.strip()}", wide), *_pieces(command.rstrip(), wide)]
    made, rest = [], line
    while len(rest) > wide:
        cut = rest.rfind(" ", len(indent) + 1, wide - 1)
        if cut <= len(indent):
            break
        made.append(f"{rest[:cut]} \\")
        rest = f"{indent}  {rest[cut + 1 :]}"
    return [*made, rest]

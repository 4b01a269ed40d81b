"""Text output, wrapped to the terminal's width and unwrapped in pipes and files."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from rich.console import Console

MIN_COLUMNS = 60
DEFAULT_COLUMNS = 80


MAX_TEXT_COLUMNS = 120
DEFAULT_TEXT_COLUMNS = 100


def room(stream: TextIO) -> int | None:
    """Return the terminal's columns; None without a terminal. COLUMNS overrides the terminal."""
    if not stream.isatty():
        return None
    stated = os.environ.get("COLUMNS", "")
    if stated.isdigit() and int(stated) > 0:
        return max(MIN_COLUMNS, int(stated))
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return max(MIN_COLUMNS, columns or DEFAULT_COLUMNS)


def text_columns() -> int:
    """Return the columns of a text that is folded in files as well."""
    columns = shutil.get_terminal_size((DEFAULT_TEXT_COLUMNS, 24)).columns
    return min(MAX_TEXT_COLUMNS, max(MIN_COLUMNS, columns))


def wrapped(
    text: str,
    columns: int | None,
    *,
    indent: str = "",
) -> str:
    """Wrap to `columns`; None: unchanged."""
    if columns is None:
        return indent + text
    wrapper = textwrap.TextWrapper(
        columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a sentence on stdout or another stream."""
    stream = stream or sys.stdout
    print(wrapped(text, room(stream)), file=stream)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table aligned by spaces: importing rich would take longer than the rest of a command.

    Columns beyond the terminal's width are printed below each row.
    """
    cells = [list(columns)]
    for row in rows:
        cells.append([str(value) for value in row])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    terminal = room(sys.stdout)
    count = max(1, _columns_that_fit(widths, terminal))  # columns of the table itself
    for number, texts in enumerate(cells):
        padded = [cell.ljust(width) for cell, width in zip(texts[:count], widths, strict=False)]
        print("  ".join(padded).rstrip())
        if number and count < len(columns):
            below = zip(columns[count:], texts[count:], strict=True)
            text = "; ".join(f"{name}: {cell}" for name, cell in below)
            print(wrapped(text, terminal, indent="    "))


def _columns_that_fit(widths: Sequence[int], terminal: int | None) -> int:
    if terminal is None:
        return len(widths)
    end = 0
    for index, width in enumerate(widths):
        end += width
        if end + 2 * index > terminal:  # with two spaces between columns
            return index
    return len(widths)


class Formatter(click.HelpFormatter):
    """Help formatter that folds example commands with a backslash, so that they stay copyable."""

    def write_text(self, text: str) -> None:
        columns = max(self.width - self.current_indent, 30)
        paragraphs = []
        for paragraph in text.split("\n\n"):
            lines = paragraph.split("\n")
            if lines[0].strip() == "\b":  # preformatted
                paragraph = "\n".join(["\b", *_folded_lines(lines[1:], columns)])
            paragraphs.append(paragraph)
        super().write_text("\n\n".join(paragraphs))


class Context(click.Context):
    formatter_class = Formatter


def _folded_lines(lines: Sequence[str], columns: int) -> Iterator[str]:
    for line in lines:
        yield from _folded(line, columns)


def _folded(line: str, columns: int) -> list[str]:
    """Return an example command in lines that end in a backslash; its comment precedes it."""
    if len(line) <= columns:
        return [line]
    indent = line[: len(line) - len(line.lstrip(" "))]
    command, _, comment = line.partition("  # ")
    if comment:
        comment_lines = _folded(f"{indent}# {comment.strip()}", columns)
        return [*comment_lines, *_folded(command.rstrip(), columns)]
    lines = []
    while len(line) > columns:
        cut = line.rfind(" ", len(indent) + 1, columns - 1)
        if cut <= len(indent):
            break
        lines.append(f"{line[:cut]} \\")
        line = f"{indent}  {line[cut + 1 :]}"
    return [*lines, line]


COLUMNS_OF_PIPE = 120


class PlainConsole:
    """Console of plain lines: as wide as the terminal, or 120 columns for a pipe. rich's takes as
    long to import as a tenth of a prediction.
    """

    def __init__(self, *, to_stderr: bool) -> None:
        self._to_stderr = to_stderr
        columns = room(_stream(to_stderr=to_stderr))
        self.soft_wrap = columns is None
        self.width = columns or COLUMNS_OF_PIPE

    def print(
        self,
        text: str = "",
        /,
        *,
        soft_wrap: bool | None = None,
    ) -> None:
        """Print a text; with `soft_wrap`, and in a pipe, without breaks of its lines."""
        stream = _stream(to_stderr=self._to_stderr)
        is_wrapped = not (self.soft_wrap or soft_wrap)
        if is_wrapped:
            text = wrapped(text, self.width)
        # At once, in a pipe as well: advice after the verdict may take longer.
        print(text, file=stream, flush=True)


def _stream(*, to_stderr: bool) -> TextIO:
    return sys.stderr if to_stderr else sys.stdout


def console(*, to_stderr: bool) -> Console:
    """Return a rich console: as wide as the terminal, or 120 columns for a pipe."""
    from rich.console import Console

    stream = _stream(to_stderr=to_stderr)
    # Without a terminal rich would assume 80 columns.
    terminal = stream.isatty()
    return Console(
        file=stream,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not terminal,
        width=None if terminal else COLUMNS_OF_PIPE,
    )

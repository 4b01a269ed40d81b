"""Text output, wrapped to the terminal's width and unwrapped in pipes and files."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from autotune.core.events import Event, JobStarted, Listener

MIN_COLUMNS = 60
DEFAULT_COLUMNS = 80


def room(stream: TextIO) -> int | None:
    """Return the terminal's columns; None without a terminal. COLUMNS overrides the terminal."""
    if not stream.isatty():
        return None
    named = os.environ.get("COLUMNS", "")
    if named.isdigit() and int(named) > 0:
        return max(MIN_COLUMNS, int(named))
    try:
        found = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        found = 0
    return max(MIN_COLUMNS, found or DEFAULT_COLUMNS)


def wrapped(text: str, columns: int | None, *, indent: str = "") -> str:
    """Wrap to `columns`; None: unchanged."""
    if columns is None:
        return indent + text
    return "\n".join(
        textwrap.fill(
            line,
            columns,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        for line in text.split("\n")
    )


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a sentence on stdout or another stream."""
    where = stream or sys.stdout
    print(wrapped(text, room(where)), file=where)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table aligned by spaces: importing rich would take longer than the rest of a command.

    Columns beyond the terminal's width are printed below each row.
    """
    cells = [list(columns), *([str(value) for value in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    wide = room(sys.stdout)
    beside = [
        index
        for index in range(len(widths))
        if wide is None or sum(widths[: index + 1]) + 2 * index <= wide
    ] or [0]
    below = [index for index in range(len(widths)) if index not in beside]
    for number, row in enumerate(cells):
        print("  ".join(row[index].ljust(widths[index]) for index in beside).rstrip())
        if below and number:
            print(
                wrapped(
                    "; ".join(f"{columns[index]}: {row[index]}" for index in below),
                    wide,
                    indent="    ",
                )
            )


class Formatter(click.HelpFormatter):
    """Help formatter that folds example commands with a backslash, so that they stay copyable."""

    def write_text(self, text: str) -> None:
        wide = max(self.width - self.current_indent, 30)
        paragraphs = [paragraph.split("\n") for paragraph in text.split("\n\n")]
        for lines in paragraphs:
            if lines[0].strip() == "\b":  # preformatted
                lines[:] = ["\b", *(piece for line in lines[1:] for piece in _pieces(line, wide))]
        super().write_text("\n\n".join("\n".join(lines) for lines in paragraphs))


class Context(click.Context):
    formatter_class = Formatter


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


class Waiting:
    """Line with a moving sign: `with Waiting("reading the request") as waiting:
    waiting.show("tracing")`.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._status: Status | None = None

    def __enter__(self) -> Waiting:
        if sys.stderr.isatty():
            self.show(self._text)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def show(self, text: str) -> None:
        """Replace the line; nothing without a terminal."""
        if not sys.stderr.isatty():
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console(
                file=sys.stderr, markup=False, highlight=False, emoji=False
            ).status("")
            self._status.start()
        self._status.update(text)

    def stop(self) -> None:
        """Remove the line: output follows."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def console(*, to_stderr: bool) -> Console:
    """Return a rich console: as wide as the terminal, or 120 columns for a pipe."""
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    # Without a terminal rich would assume 80 columns.
    terminal = stream.isatty()
    return Console(
        file=stream,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not terminal,
        width=None if terminal else 120,
    )


class Terminal:
    """Listener for `autotune.run`, used as a context manager."""

    def __init__(self, *, to_stderr: bool) -> None:
        self.words = console(to_stderr=to_stderr)
        self._open = contextlib.ExitStack()
        self._started: JobStarted | None = None
        self._progress: Listener | None = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.quiet()

    def quiet(self) -> None:
        """Stop the progress display; later output stays on screen."""
        self._progress = None
        self._open.close()

    def __call__(self, event: Event) -> None:
        from autotune.core.events import JobStarted, Note

        if isinstance(event, JobStarted):
            self.quiet()
            self._started = event
            self.show(event)
            if event.job.mode == "predict":
                self._open.enter_context(
                    Waiting(f"predicting {len(event.candidates):,} candidates")
                )
        elif isinstance(event, Note) and (
            self._started is None or self._started.job.mode == "predict"
        ):
            say(event.text, sys.stderr)
        elif self._started is not None and self._started.job.mode != "predict":
            if self._progress is None:
                from autotune.report.job_text import Progress

                self._progress = self._open.enter_context(Progress(self._started.job.space))
            self._progress(event)

    def show(self, event: JobStarted) -> None:
        """Show the parsed job."""
        from autotune.report.job_text import show_job

        show_job(self.words, event.job, event.candidates, assumed=event.assumed, notes=event.notes)

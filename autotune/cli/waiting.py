"""Progress of a prediction: one line on stderr, on a terminal only, gone when the answer is printed."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status


class Waiting:
    """Line with a moving sign: `with Waiting("reading the request") as waiting: waiting.show("tracing")`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._status: Status | None = None

    def __enter__(self) -> Waiting:
        if sys.stderr.isatty():
            self.show(self._text)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def show(self, text: str) -> None:
        """Replace the line; nothing without a terminal."""
        if not sys.stderr.isatty():
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console(file=sys.stderr, markup=False, highlight=False, emoji=False).status("")
            self._status.start()
        self._status.update(text)

    def stop(self) -> None:
        """Remove the line: output follows."""
        if self._status is not None:
            self._status.stop()
            self._status = None

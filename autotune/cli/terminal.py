"""What a person at a terminal hears of a search: first how the question was understood, then its progress."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from autotune.cli.question import console
from autotune.events import Begun, Event

if TYPE_CHECKING:
    from autotune.events import Listener


class Terminal:
    """A listener: `with Terminal(to_stderr=...) as terminal: autotune.run(..., listener=terminal)`."""

    def __init__(self, *, to_stderr: bool) -> None:
        self.words = console(to_stderr=to_stderr)
        self._open = contextlib.ExitStack()
        self._begun: Begun | None = None
        self._progress: Listener | None = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.quiet()

    def quiet(self) -> None:
        """Nothing moves any more: what is printed from here on stays."""
        self._progress = None
        self._open.close()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Begun):
            self.quiet()
            self._begun = event
            self.show(event)
        elif self._begun is not None and self._begun.question.mode == "probe":
            if self._progress is None:
                self._progress = self._measuring(self._begun)
            self._progress(event)

    def _measuring(self, begun: Begun) -> Listener:
        """Loaded when there is something to watch: what is on record answers without."""
        from autotune.report import Progress

        return self._open.enter_context(Progress(begun.question.space))

    def show(self, event: Begun) -> None:
        """How the question was understood."""
        from autotune.report import show_question

        show_question(self.words, event.question, event.candidates, assumed=event.assumed, notes=event.notes)

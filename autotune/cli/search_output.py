"""Terminal output of a search: the parsed job, then its progress."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from autotune.cli.formatting import say
from autotune.cli.options import console
from autotune.cli.waiting import Waiting
from autotune.core.events import Event, JobStarted, Note

if TYPE_CHECKING:
    from autotune.core.events import Listener


class Terminal:
    """Listener for `autotune.run`, used as a context manager."""

    def __init__(self, *, to_stderr: bool) -> None:
        self.words = console(to_stderr=to_stderr)
        self._open = contextlib.ExitStack()
        self._started: JobStarted | None = None
        self._progress: Listener | None = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.quiet()

    def quiet(self) -> None:
        """Stop the progress display; later output stays on screen."""
        self._progress = None
        self._open.close()

    def __call__(self, event: Event) -> None:
        if isinstance(event, JobStarted):
            self.quiet()
            self._started = event
            self.show(event)
            if event.job.mode == "predict":
                self._open.enter_context(Waiting(f"predicting {len(event.candidates):,} candidates"))
        elif isinstance(event, Note) and (self._started is None or self._started.job.mode == "predict"):
            say(event.text, sys.stderr)
        elif self._started is not None and self._started.job.mode != "predict":
            if self._progress is None:
                from autotune.report.progress import Progress  # imported late: an answer from the record needs none

                self._progress = self._open.enter_context(Progress(self._started.job.space))
            self._progress(event)

    def show(self, event: JobStarted) -> None:
        """Show the parsed job."""
        from autotune.report.terminal import show_job

        show_job(self.words, event.job, event.candidates, assumed=event.assumed, notes=event.notes)

"""Display of waiting on stderr: what is done, how far, and for how long; on a terminal a moving
line, in a pipe one line each ten seconds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from autotune.cli.output import console, say
from autotune.core import progress
from autotune.core.progress import WorkProgress
from autotune.core.units import counted, format_seconds

if TYPE_CHECKING:
    from rich.live import Live

    from autotune.core.events import Event, JobStarted, Listener
    from autotune.report.heartbeat import Heartbeat

SIGNS = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SIGNS_PER_SECOND = 8


class Waiting:
    """Line about the work that runs: `with Waiting("reading the request") as waiting:
    waiting.show("tracing")`.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._progress: WorkProgress | None = None
        self._began = time.monotonic()
        self._live: Live | None = None
        self._heartbeat: Heartbeat | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Waiting:
        self._open.enter_context(progress.watched_by(self._receive))
        self.show(self._text)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self.stop()

    def show(self, text: str) -> None:
        """Replace the text, and show it again after `stop`."""
        self._text = text
        if self._live is None and self._heartbeat is None:
            self._began = time.monotonic()
            self._start()

    def stop(self) -> None:
        """Remove the line before other output."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _start(self) -> None:
        if not sys.stderr.isatty():
            from autotune.report.heartbeat import Heartbeat

            self._heartbeat = Heartbeat(lambda: say(self.line(), sys.stderr))
            self._heartbeat.start()
            return
        from rich.console import Console
        from rich.live import Live

        display = Console(
            file=sys.stderr,
            markup=False,
            highlight=False,
            emoji=False,
        )
        self._live = Live(
            get_renderable=self._moving_line,
            console=display,
            refresh_per_second=SIGNS_PER_SECOND,
            transient=True,
        )
        self._live.start()

    def _receive(self, done: WorkProgress) -> None:
        self._progress = done

    def line(self) -> str:
        """Return what is done, how far, and for how long."""
        parts = [self._text]
        if self._progress is not None:
            parts.append(str(self._progress))
        seconds = time.monotonic() - self._began
        if seconds >= 1:
            parts.append(format_seconds(int(seconds)))
        return ", ".join(parts)

    def _moving_line(self) -> str:
        seconds = time.monotonic() - self._began
        turn = int(seconds * SIGNS_PER_SECOND)
        sign = SIGNS[turn % len(SIGNS)]
        return f"{sign} {self.line()}"


class Terminal:
    """Listener for `autotune.run`, used as a context manager."""

    def __init__(self, *, to_stderr: bool) -> None:
        self.output = console(to_stderr=to_stderr)
        self._open = contextlib.ExitStack()
        self._started: JobStarted | None = None
        self._progress: Listener | None = None

    def __enter__(self) -> Terminal:
        self._wait("reading the request")
        return self

    def __exit__(self, *_: object) -> None:
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
            candidates = counted(len(event.candidates), "candidate")
            if event.job.task.hardware.kind == "cuda":
                self._wait(f"predicting {candidates}")
            else:
                self._wait("preparing the first probe")
        elif self._is_searching():
            if self._progress is None:
                self._show_search()
            assert self._progress is not None
            self._progress(event)
        elif isinstance(event, Note):
            self._open.close()
            say(event.text, sys.stderr)

    def _is_searching(self) -> bool:
        return self._started is not None and self._started.job.mode != "predict"

    def _show_search(self) -> None:
        from autotune.report.job_text import Progress

        assert self._started is not None
        self.quiet()
        self._progress = self._open.enter_context(Progress(self._started.job.space))

    def _wait(self, text: str) -> None:
        self._open.enter_context(Waiting(text))

    def show(self, event: JobStarted) -> None:
        """Show the parsed job."""
        from autotune.report.job_text import show_job

        show_job(self.output, event.job, event.candidates, assumed=event.assumed, notes=event.notes)

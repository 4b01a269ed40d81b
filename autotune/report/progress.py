"""Progress of the search on stderr: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from autotune.core.answer import Trial, setting_text
from autotune.core.events import CandidatesPruned, Event, Note, ProbeEnded, ProbeStarted
from autotune.core.space import Candidate, SearchSpace
from autotune.core.units import format_bytes, format_seconds
from autotune.report.line_wrapping import print_line, shorten

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

MAX_CHARACTERS = 120


class Progress:
    """Listener: `with Progress(space) as progress: run_search(..., listener=progress)`."""

    def __init__(self, space: SearchSpace, *, stream: TextIO | None = None) -> None:
        from rich.console import Console

        self._moving = tuple(knob.name for knob in space.knobs if len(knob.choices) > 1)
        where = stream or sys.stderr
        # No markup or highlight: knob values are data. Whole lines in a pipe, wrapped ones on a terminal.
        self._console: Console = Console(file=where, markup=False, highlight=False, emoji=False, soft_wrap=not where.isatty())
        self._live: Live | None = None
        self._probes = 0
        self._line = ""
        self._running: dict[int, int] = {}  # running trials -> probe number on this display
        self._best = ""
        self._deadline: float | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich.live import Live

            self._live = Live(get_renderable=self._status, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, event: Event) -> None:
        match event:
            case CandidatesPruned():
                self._set_deadline(event.budget_seconds)
                resumed = f"; {event.resumed_trials} already measured" if event.resumed_trials else ""
                budget = format_seconds(event.budget_seconds)
                self._print(f"{event.candidates} candidates{resumed}; at most {event.max_probes} probes in {budget}.")
            case ProbeStarted():
                self._set_deadline(event.seconds_left)
                self._probes += 1
                self._running[event.number] = self._probes
                load = ", loading first" if event.loads else ""
                self._line = f"probe {self._probes} ({event.purpose}{load}): {self._short(event.candidate)}"
                if self._live is None:
                    self._print(f"{self._line} [{_left(event.seconds_left)}]")
            case ProbeEnded():
                self._set_deadline(event.seconds_left)
                self._best = f"best so far {_speed(event.best)}" if event.best else "nothing fits yet"
                candidate = f"   {self._short(event.trial.candidate)}" if self._live is not None else ""
                several = len(self._running) > 1
                name = self._running.pop(event.trial.number, None)
                which = f"probe {name}: " if several and name is not None else ""
                self._print(f"  {which}{_outcome(event.trial)}{candidate}")
                self._line = f"{len(self._running)} probes at a time" if self._running else ""
            case Note(text=text):
                self._print(text)

    def _short(self, candidate: Candidate) -> str:
        moving = (f"{name}={setting_text(value)}" for name, value in candidate.knobs.items() if name in self._moving)
        return " ".join(moving) or "the only candidate"

    def _print(self, text: str) -> None:
        print_line(self._console, text)

    def _set_deadline(self, seconds_left: float) -> None:
        self._deadline = self._console.get_time() + seconds_left

    def _status(self) -> str:
        left = max(0.0, (self._deadline or 0.0) - self._console.get_time())
        parts = [self._line or "choosing the next candidate", self._best, _left(left)]
        line = " · ".join(part for part in parts if part)
        width = self._console.width - 1
        return line if len(line) <= width else line[: width - 1] + "…"


def _left(seconds: float) -> str:
    return f"{format_seconds(seconds)} left"


def _speed(trial: Trial) -> str:
    speed = trial.measurement.ranking_speed
    predicted = "predicted " if trial.measurement.emulated else ""
    return f"{predicted}{speed.tokens_per_second:.0f} tokens/s" if speed else "of unknown speed"


def _outcome(trial: Trial) -> str:
    measured = trial.measurement
    peak = measured.memory.peak_bytes
    memory = f", {'emulated ' if measured.emulated else ''}peak {format_bytes(peak)}" if peak is not None else ""
    seconds = format_seconds(measured.cost.total_seconds)
    if trial.verdict.fits:
        early = " (stopped early: slower than the best)" if measured.worst and measured.worst.cut_short else ""
        return f"fits: {_speed(trial)}{memory}, took {seconds}{early}"
    failed = measured.failure if not measured.outcome.is_out_of_memory else None
    why = f": {shorten(failed.evidence, MAX_CHARACTERS)}" if failed else ""
    return f"{measured.outcome}{memory}, took {seconds}{why}"

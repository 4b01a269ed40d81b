"""Terminal output of a job: the parsed request, and the progress of its search on stderr."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from autotune.core.events import (
    BestPredicted,
    CandidatesPruned,
    Event,
    Note,
    ProbeEnded,
    ProbeStarted,
)
from autotune.core.job import Job
from autotune.core.secrets import without_password
from autotune.core.space import Candidate, Knob, KnobValue, SearchSpace, setting_text
from autotune.core.units import counted, format_bytes, format_seconds
from autotune.report.heartbeat import Heartbeat
from autotune.report.verdict_text import verdict_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from autotune.core.answer import Trial
    from autotune.core.dataset import RowLengths
    from autotune.report.text_console import TextConsole

LABEL_COLUMNS = 9
_LABEL = re.compile(r"[a-z]+ +")
MAX_VALUE_CHARACTERS = 120


def show_job(
    console: TextConsole,
    job: Job,
    candidates: Sequence[Candidate],
    *,
    assumed: Sequence[str],
    notes: Sequence[str] = (),
) -> None:
    """Print the job before the search: assumptions, held settings, searched knobs."""
    print_line(console, describe_job(job))
    print_line(console, f"limit    {limit_text(job)}")
    if assumed:
        print_line(
            console, f"assumed  {', '.join(assumed)}; name another on the command line to change it"
        )
    held_settings = assignments(_held(job, candidates))
    if held_settings:
        print_line(console, f"held     {held_settings}")
    for effect, label in (("learning", "what is learned"), ("neutral", "only speed and memory")):
        has_title = False
        for knob in searched_knobs(job):
            if knob.effect_under(job.task.workload.held_values) != effect:
                continue
            if not has_title:
                console.print(f"searched, changes {label}")
                has_title = True
            choices = ", ".join(map(setting_text, knob.choices))
            print_line(console, f"  {knob.name}: {choices}")
    show_notes(console, job, notes)
    study = ""
    if job.mode != "predict":
        study = f"; study {job.study_name!r} in {without_password(job.storage)}"
    print_line(console, f"out      {job.out}{study}")
    console.print()


def searched_knobs(job: Job) -> list[Knob]:
    """Return the knobs with several choices whose conditions can hold in this space."""
    return [knob for knob in job.space.knobs if len(knob.choices) > 1 and _can_apply(knob, job)]


def _can_apply(knob: Knob, job: Job) -> bool:
    conditions = knob.when.items()
    return all(set(values) & set(job.space[name].choices) for name, values in conditions)


def _held(job: Job, candidates: Sequence[Candidate]) -> dict[str, KnobValue]:
    """Return the settings common to all candidates, without nulls and without settings that none
    passes on.
    """
    passed: set[str] = set()
    for candidate in candidates:
        passed |= set(candidate.settings)
    settings: dict[str, KnobValue] = dict(job.task.workload.held_values)
    for knob in job.space.knobs:
        if len(knob.choices) > 1:
            settings.pop(knob.name, None)
    for knob in job.space.knobs:
        if len(knob.choices) == 1 and knob.name in passed:
            settings[knob.name] = knob.choices[0]
    return {name: value for name, value in settings.items() if value is not None}


def describe_job(job: Job) -> str:
    workload = job.task.workload
    model = workload.model
    return (
        f"{workload.method} of {model.name} ({model.origin}) with {workload.framework}, on"
        f" {job.task.hardware}"
    )


def limit_text(job: Job) -> str:
    limit = format_bytes(job.memory_limit_bytes)
    if not job.task.hardware.memory_is_shared:
        return f"{limit} per GPU"
    if job.task.hardware.count > 1:
        return f"{limit} for all ranks together"
    return limit


def assignments(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={setting_text(value)}" for name, value in knobs.items())


def show_notes(
    console: TextConsole,
    job: Job,
    notes: Sequence[str],
) -> None:
    """Print the lengths of the user's rows, and the notes."""
    for line in data_lines(job.data):
        print_line(console, line)
    for note in notes:
        print_line(console, f"note     {note}")


def data_lines(lengths: RowLengths | None) -> Iterator[str]:
    """Yield lines for a terminal; none without lengths."""
    if lengths is None:
        return
    part = ""
    if lengths.looked_at != lengths.rows:
        part = f" ({lengths.looked_at:,} of them read)"
    longest = lengths.percentiles[-1].length
    yield (
        f"dataset  {lengths.rows:,} rows{part}, {lengths.tokens / lengths.looked_at:,.0f} tokens on"
        f" average, {longest:,} at most"
    )
    yield "         rows within   length   truncating drops   filtering drops"
    for at in lengths.percentiles[:-1]:
        yield (
            f"         {at.share:>10}%   {at.length:>6,}   {_share(at.cut, lengths.tokens):>6} of"
            f" tokens   {_share(at.longer, lengths.looked_at):>6} of rows,"
            f" {_share(at.left_out, lengths.tokens)} of tokens"
        )


def _share(part: int, total: int) -> str:
    if not total:
        return "0.0%"
    return f"{100 * part / total:.1f}%"


def print_line(console: TextConsole, text: str) -> None:
    """Print one line, wrapped on a terminal and unchanged in a pipe."""
    if console.soft_wrap or len(text) <= console.width:
        console.print(text)
        return
    label = _LABEL.match(text)
    columns = len(text) - len(text.lstrip()) + 4
    if label and label.end() == LABEL_COLUMNS:
        columns = LABEL_COLUMNS
    console.print(
        textwrap.fill(text, console.width, subsequent_indent=" " * columns, break_on_hyphens=False),
        soft_wrap=True,
    )


def shorten(text: str, max_length: int) -> str:
    """Shorten to a number of characters, at a word, with an ellipsis."""
    if len(text) <= max_length:
        return text
    return f"{text[:max_length].rsplit(None, 1)[0]} ..."


class Progress:
    """Listener: `with Progress(space) as progress: run_search(..., listener=progress)`."""

    def __init__(self, space: SearchSpace, *, stream: TextIO | None = None) -> None:
        from rich.console import Console

        self._moving = tuple(knob.name for knob in space.knobs if len(knob.choices) > 1)
        target = stream or sys.stderr
        # No markup or highlight: knob values are data. Whole lines in a pipe, wrapped ones on a
        # terminal.
        self._console: Console = Console(
            file=target,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=not target.isatty(),
        )
        self._live: Live | None = None
        self._heartbeat = Heartbeat(self._print_running)
        self._probes = 0
        self._line = ""
        self._running: dict[int, int] = {}  # running trials -> probe number on this display
        self._best = ""
        self._deadline: float | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich.live import Live

            self._live = Live(
                get_renderable=self._status,
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        else:
            self._heartbeat.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        else:
            self._heartbeat.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case BestPredicted(best=best):
                self._print(f"best by prediction: {self._short(best.candidate)}")
                self._print(f"  predicted: {verdict_text(best.prediction)}")
            case CandidatesPruned():
                self._show_space(event)
            case ProbeStarted():
                self._show_start(event)
            case ProbeEnded():
                self._show_end(event)
            case Note(text=text):
                self._print(text)

    def _show_space(self, event: CandidatesPruned) -> None:
        self._set_deadline(event.budget_seconds)
        resumed = ""
        if event.resumed_trials:
            resumed = f"; {event.resumed_trials} already measured"
        budget = format_seconds(event.budget_seconds)
        self._print(
            f"{counted(event.candidates, 'candidate')}{resumed}; at most"
            f" {counted(event.max_probes, 'probe')} in {budget}."
        )

    def _show_start(self, event: ProbeStarted) -> None:
        self._set_deadline(event.seconds_left)
        self._probes += 1
        self._running[event.number] = self._probes
        load = ", loading first" if event.loads else ""
        self._line = f"probe {self._probes} ({event.purpose}{load}): {self._short(event.candidate)}"
        if self._live is None:
            self._print(f"{self._line} [{_left(event.seconds_left)}]")

    def _show_end(self, event: ProbeEnded) -> None:
        # 1. The best so far, for the line at the bottom of a terminal.
        self._set_deadline(event.seconds_left)
        self._best = "nothing fits yet"
        if event.best:
            self._best = f"best so far {_speed(event.best)}"

        # 2. The outcome; beside others with the probe's number.
        candidate = ""
        if self._live is not None:
            candidate = f"   {self._short(event.trial.candidate)}"
        are_several = len(self._running) > 1
        name = self._running.pop(event.trial.number, None)
        outcome = _outcome(event.trial)
        if are_several and name is not None:
            outcome = f"probe {name}: {outcome}"
        self._print(f"  {outcome}{candidate}")

        # 3. What still runs.
        self._line = ""
        if self._running:
            self._line = f"{counted(len(self._running), 'probe')} at a time"

    def _short(self, candidate: Candidate) -> str:
        moving = []
        for name, value in candidate.knobs.items():
            if name in self._moving:
                moving.append(f"{name}={setting_text(value)}")
        return " ".join(moving) or "the only candidate"

    def _print(self, text: str) -> None:
        self._heartbeat.postpone()
        print_line(self._console, text)

    def _print_running(self) -> None:
        """Print what runs, for a log in which nothing else appeared for a while."""
        running = self._line.partition(":")[0] or "choosing the next candidate"
        self._print(f"  ... {running} [{_left(self._seconds_left())}]")

    def _set_deadline(self, seconds_left: float) -> None:
        self._deadline = self._console.get_time() + seconds_left

    def _seconds_left(self) -> float:
        return max(0.0, (self._deadline or 0.0) - self._console.get_time())

    def _status(self) -> str:
        line = self._line or "choosing the next candidate"
        parts = [line, self._best, _left(self._seconds_left())]
        line = " · ".join(filter(None, parts))
        width = self._console.width - 1
        if len(line) > width:
            line = line[: width - 1] + "…"
        return line


def _left(seconds: float) -> str:
    return f"{format_seconds(seconds)} left"


def _speed(trial: Trial) -> str:
    speed = trial.measurement.ranking_speed
    if speed is None:
        return "of unknown speed"
    predicted = "predicted " if trial.measurement.emulated else ""
    return f"{predicted}{speed.tokens_per_second:.0f} tokens/s"


def _outcome(trial: Trial) -> str:
    measured = trial.measurement
    peak = measured.memory.peak_bytes
    memory = ""
    if peak is not None:
        emulated = "emulated " if measured.emulated else ""
        memory = f", {emulated}peak {format_bytes(peak)}"
    seconds = format_seconds(measured.cost.total_seconds)
    if trial.verdict.fits:
        text = f"fits: {_speed(trial)}{memory}, took {seconds}"
        if measured.worst and measured.worst.cut_short:
            text += " (stopped early: slower than the best)"
        return text
    text = f"{measured.outcome}{memory}, took {seconds}"
    if measured.failure is not None and not measured.outcome.is_out_of_memory:
        text += f": {shorten(measured.failure.evidence, MAX_VALUE_CHARACTERS)}"
    return text

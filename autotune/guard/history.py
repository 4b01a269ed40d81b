"""Events of a guarded run: guard.json, and the printed blocks.

The file is replaced after each event, so that a guard that was killed leaves what it knew.
"""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotune.core.files import write_atomically
from autotune.core.space import KnobValue, setting_text
from autotune.core.units import counted, format_bytes, format_seconds
from autotune.failures.table import CAUSES
from autotune.guard.checkpoints import Checkpoint, FoundCheckpoints
from autotune.guard.ending import Ending, Reason
from autotune.guard.smaller import OWN_VALUES, Choice
from autotune.guard.trainer_facts import ShownFacts
from autotune.guard.watched import AttemptPeaks
from autotune.report.html.guard_page import render_guard
from autotune.request.sources.length_sources import GUARD_FILE, Step

SCHEMA = 1
GUARD_PAGE = "report.html"
LINE_WIDTH = 200  # of a message that ended the run, where it is printed

SENTENCES: Mapping[Reason, str] = {
    Reason.FINISHED: "the training ended",
    Reason.STOPPED: "it was stopped by a signal",
    Reason.MEMORY: "memory ran out",
    Reason.MACHINE: "the machine failed",
    Reason.EARLY: "it saved and stopped before memory ran out",
    Reason.HANG: "it made no step any more",
    Reason.SCRIPT: "the script or its settings failed",
}


@dataclass(kw_only=True)
class AttemptRecord:
    """Attempt, as in guard.json."""

    number: int
    config: str | None
    command: list[str]
    began: float  # seconds since the epoch
    from_step: int | None  # of the checkpoint; None: from the beginning
    checkpoint: str | None
    seconds: float | None = None
    last_step: int | None = None
    total_steps: int | None = None
    end: dict[str, Any] | None = None  # reason, cause, evidence, exit, signal
    step_seconds: float | None = None  # the middle of the steps' times
    lengths: list[Step] = field(default_factory=list)  # of completions, by printed step
    tokens_per_second: float | None = None  # in the loss; None: lengths or hardware not known
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    margin_bytes: int | None = None
    place: str | None = None
    phase_peak_bytes: dict[str, int] | None = None  # None: no `MemoryWatch` in the trainer
    longest_row: int | None = None  # tokens in a forward pass, likewise
    longest_prompt: int | None = None  # likewise
    longest_completion: int | None = None  # likewise
    ran_out: dict[str, Any] | None = None  # phase and rows, likewise
    host_peak_bytes: int | None = None
    memory: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    output: str | None = None  # file with its last output
    change: dict[str, KnobValue] | None = None  # made after it
    basis: str | None = None

    def ended(
        self,
        ending: Ending,
        seconds: float,
        peaks: AttemptPeaks,
        facts: ShownFacts | None = None,
    ) -> None:
        self.seconds = round(seconds, 3)
        self.end = {
            "reason": str(ending.reason),
            "cause": ending.cause,
            "evidence": ending.evidence,
            "exit": ending.end.exit,
            "signal": ending.end.signal,
        }
        if peaks.peak is not None:
            self.peak_bytes = peaks.peak.peak_bytes
            self.limit_bytes = peaks.peak.limit_bytes
            self.margin_bytes = peaks.peak.margin_bytes
            self.place = peaks.peak.place
        self.host_peak_bytes = peaks.host_bytes or None
        if facts is not None:
            self.phase_peak_bytes = dict(facts.phase_peak_bytes)
            self.longest_row = facts.longest_row
            self.longest_prompt = facts.longest_prompt
            self.longest_completion = facts.longest_completion
            if facts.ran_out_in is not None:
                rows = facts.ran_out_rows
                self.ran_out = {
                    "phase": facts.ran_out_in,
                    "rows": None if rows is None else asdict(rows),
                }
        self.memory = []
        for sample in peaks.timeline:
            self.memory.append({"seconds": sample.seconds, "bytes": sample.peak_bytes})

    def saved(self, checkpoint: Checkpoint) -> bool:
        """Note a checkpoint; return False for one that is known."""
        if any(saved["step"] == checkpoint.step for saved in self.checkpoints):
            return False
        seconds = round(max(0.0, checkpoint.written - self.began), 3)
        self.checkpoints.append({"step": checkpoint.step, "seconds": seconds})
        return True


@dataclass(kw_only=True)
class History:
    """Attempts of one guarded run."""

    out: Path
    config: str | None
    status: str = "running"
    proof: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    earlier: Sequence[Mapping[str, Any]] = ()  # attempts of the guards that this one resumes
    lost_seconds: float = 0.0
    exit_code: int | None = None

    @property
    def file(self) -> Path:
        return self.out / GUARD_FILE

    @property
    def restarts(self) -> int:
        return max(0, len(self.attempts) - 1)

    def document(self) -> dict[str, Any]:
        """Return the content of guard.json."""
        latest = self._of_latest_attempt()
        steps = [attempt.last_step for attempt in self.attempts if attempt.last_step is not None]
        peaks = [attempt.peak_bytes for attempt in self.attempts if attempt.peak_bytes is not None]
        return {
            "schema": SCHEMA,
            "status": self.status,
            "basis": "measured",
            "config": self.config,
            "use": latest.get("config"),
            "proof": self.proof,
            "steps": max(steps, default=None),
            "total_steps": latest.get("total_steps"),
            "restarts": self.restarts,
            "lost_seconds": round(self.lost_seconds, 3),
            "peak_memory_bytes": max(peaks, default=None),
            "limit_bytes": latest.get("limit_bytes"),
            "margin_bytes": latest.get("margin_bytes"),
            "exit_code": self.exit_code,
            "notes": list(self.notes),
            "earlier_attempts": list(self.earlier),
            "attempts": [asdict(attempt) for attempt in self.attempts],
        }

    def _of_latest_attempt(self) -> Mapping[str, Any]:
        """Return the fields of the latest attempt; none before the first."""
        if not self.attempts:
            return {}
        return vars(self.attempts[-1])

    def write(self) -> str | None:
        """Write guard.json; return why it could not be written."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.document(), indent=2, default=str)
            write_atomically(self.file, f"{text}\n".encode())
        except OSError as error:
            return f"{self.file} could not be written: {error.strerror}"
        return None

    def write_page(self) -> None:
        """Write report.html beside guard.json; a full disk leaves it out."""
        with contextlib.suppress(OSError):
            page = render_guard(self.document())
            write_atomically(self.out / GUARD_PAGE, page.encode())


def last_run(out: Path, config: str | None) -> Mapping[str, Any] | None:
    """Return the history of an earlier guarded run of this configuration that did not end well."""
    try:
        document: dict[str, Any] = json.loads((out / GUARD_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    is_same = isinstance(document, dict) and document.get("schema") == SCHEMA
    if not is_same or document.get("config") != config or document.get("status") == "finished":
        return None
    return document


def attempts_in(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return all attempts of a guard.json, with those of the guards that it resumed."""
    return [*(document.get("earlier_attempts") or ()), *(document.get("attempts") or ())]


# What is printed.


def lines_of_end(ending: Ending, record: AttemptRecord) -> list[str]:
    """Return what ended an attempt."""
    step = record.last_step
    place = "before its first step" if step is None else f"after step {step}"
    duration = format_seconds(record.seconds or 0.0)
    lines = [f"ended    {SENTENCES[ending.reason]}, {place}, {duration} in"]
    if ending.cause is not None and ending.reason != Reason.STOPPED:
        lines.append(f"cause    {CAUSES[ending.cause]} ({ending.cause})")
    if ending.evidence:
        evidence = textwrap.shorten(ending.evidence, LINE_WIDTH, placeholder=" ...")
        lines.append(f"line     {evidence}")
    if ending.is_out_of_memory and record.ran_out is not None and record.ran_out["rows"]:
        rows = record.ran_out["rows"]
        lines.append(
            f"rows     {rows['rows']} of {rows['tokens']:,} tokens, in {record.ran_out['phase']}"
        )
    return lines


def lines_of_restart(
    choice: Choice | None,
    before: Mapping[str, KnobValue],
    available: FoundCheckpoints,
    file: Path | None,
    remaining: int,
) -> list[str]:
    """Return how the run goes on."""
    lines = []
    if choice is None:
        lines.append("change   none")
    else:
        lines.append(f"change   {changes_text(choice.change, before)}")
        lines.append(f"learning {_learning_text(choice)}")
        if choice.needed_bytes is not None and choice.room_bytes is not None:
            needed = format_bytes(choice.needed_bytes)
            room = format_bytes(choice.room_bytes)
            lines.append(f"memory   {needed} predicted, of {room} by what this run has shown")
    for checkpoint, problem in available.torn:
        lines.append(f"skipped  {checkpoint.path}: {problem}")
    if available.newest is None:
        lines.append("goes on  from the beginning: there is no whole checkpoint")
    else:
        lines.append(f"goes on  from step {available.newest.step}, {available.newest.path}")
    if file is not None:
        lines.append(f"file     {file}")
    lines.append(f"left     {counted(remaining, 'restart')}")
    return lines


def _learning_text(choice: Choice) -> str:
    if choice.basis == OWN_VALUES:
        return "as --values states: the guard does not know these settings"
    if choice.learning:
        return "changes, as --may-change allows"
    return "the same: global batch and every learning setting are equal"


def changes_text(change: Mapping[str, KnobValue], before: Mapping[str, KnobValue]) -> str:
    parts = []
    for name, value in change.items():
        part = f"{name}={setting_text(value)}"
        if name in before:
            part += f" (was {setting_text(before[name])})"
        parts.append(part)
    return ", ".join(parts)


def summary(history: History) -> str:
    """Return the last line of a guarded run."""
    document = history.document()
    parts = []
    if document["steps"] is not None:
        parts.append(f"{document['steps']} steps")
    parts.append(counted(history.restarts, "restart"))
    if history.lost_seconds:
        parts.append(f"{format_seconds(history.lost_seconds)} lost")
    last = history.attempts[-1]
    if last.peak_bytes is not None and last.limit_bytes is not None:
        parts.append(f"peak {format_bytes(last.peak_bytes)} of {format_bytes(last.limit_bytes)}")
        parts.append(f"{format_bytes(max(0, last.margin_bytes or 0))} left")
    return f"{', '.join(parts)}. {history.file}"


def indented(lines: Sequence[str]) -> str:
    """Return a block of the guard's own lines, distinct from the command's output."""
    return "\n".join(f"autotune guard: {line}" for line in lines)

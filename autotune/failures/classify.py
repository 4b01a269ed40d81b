"""Classification of a run that failed: an exception, an exit without one, or a launched program."""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from autotune.core.job import DeviceKind
from autotune.core.measurement import Failure, Outcome, Phase
from autotune.failures.numbers import Numbers, numbers_of
from autotune.failures.table import (
    MEMORY_CAUSES,
    QUOTED_ROWS,
    ROWS,
    WORDS,
    FailureRow,
    cause_of,
    phase_of,
    read_table,
)
from autotune.failures.tracebacks import LoggedException, exceptions_in

FRAGMENTED_SHARE = 0.1
"""Share of the device from which idle reserved memory, enough for the request, counts as
fragmentation. Every GPU that is full has up to this share of idle pieces."""

_BY_PHASE: Mapping[str, str] = {
    "load": "weights",
    "rollout": "unknown_memory",
    "sync": "weight_sync",
    "reward": "unknown_memory",
    "score": "activations",
    "forward": "activations",
    "backward": "activations",
    "optimizer": "optimizer",
}


_LOUD_ROWS = tuple(row for row in ROWS if row.read_in == "any line")
_ERROR_ROWS = tuple(row for row in ROWS if row.read_in != "exception")
_BY_PLACE = frozenset(row.name for row in ROWS if row.raised_at is not None)
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a process does not send to itself: from an operator, a scheduler or the kernel."""

HOST_KILLED = (  # row of the messages about a killed process, which do not name a memory limit
    "host_killed"
)

RowMatch = tuple[FailureRow, re.Match[str]]


@dataclass(frozen=True, kw_only=True)
class ReportedException:
    """Exception as a rank reported it."""

    chain: Sequence[tuple[str, str]]  # type and text of the exception, then of its cause, and so on
    frames: Sequence[str] = ()  # as `file:function`, innermost last
    phase: Phase | None = None
    device: DeviceKind = "cpu"
    limit_hit: bool = False  # the kernel killed a process of the tree for lack of memory meanwhile
    printed: str = (
        ""  # output of the probe's processes, which holds the first error when a wrapper was raised
    )


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """Exit of a process without a message."""

    signal: int | None = None
    exit: int | None = None
    phase: Phase | None = None
    device: DeviceKind = "cpu"
    out_of_memory: Literal["limit", "machine", "others"] | None = None
    """Memory that ran out according to the kernel: the limit's, the machine's for what this process
    used, or the machine's for what others used."""

    printed: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    outcome: Outcome
    evidence: str  # line that decided it
    cause: str | None = None
    phase: Phase | None = None
    numbers: Numbers = field(
        default_factory=dict
    )  # figures of the message, described in tables/meanings.yaml
    row: str | None = None  # name of the row that matched
    secondary: bool = False  # another process probably failed first
    transient: bool = False  # no verdict on the candidate
    from_outside: bool = (
        False  # ended by a signal of another process: no verdict on the candidate either
    )

    @property
    def is_memory(self) -> bool:
        return self.cause in MEMORY_CAUSES and not self.transient


def classify_exception(raised: ReportedException) -> Finding:
    """Return the finding of the first row that matches; a text without a row is a crash."""
    texts = [f"{kind}: {text}" for kind, text in raised.chain]
    found = _first_match(texts, frames=raised.frames)
    if found is None or found[0].secondary:
        found = _from_print(raised.printed, only_memory=found is None) or found
    if raised.limit_hit and (found is None or found[0].secondary):
        words = "the kernel ended a process of the tree for want of memory"
        if raised.device == "cuda":  # no kernel counts a device's memory: it was the machine's
            blamed = Finding(
                outcome=Outcome.OOM_HOST, evidence=words, cause="host_ram", phase=raised.phase
            )
        else:
            blamed = _memory(None, words, raised.phase, raised.frames)
        return replace(blamed, secondary=found is not None)
    if found is None:
        evidence = _one_line(texts[0] if texts else "no error was reported")
        return Finding(outcome=Outcome.CRASH, evidence=evidence, phase=raised.phase)
    return _finding(found, raised)


def classify_logged(thrown: LoggedException, phase: Phase | None, device: DeviceKind) -> Finding:
    """Return the finding of an exception read from a log. The lines behind it are added when the
    exception alone is not decisive."""

    def classified(words: str) -> tuple[Finding, bool]:
        raised = ReportedException(
            chain=((kind, words),), frames=thrown.frames, phase=phase, device=device
        )
        found = classify_exception(raised)
        return found, not (found.row is None or found.secondary or found.row in _BY_PLACE)

    kind, _, words = thrown.text.partition(": ")
    found, is_decisive = classified(words)
    if is_decisive or not thrown.more:
        return found
    longer, is_decisive = classified(f"{words}\n{thrown.more}")
    # Behind an echo, only memory counts as its cause: libraries list general remarks there.
    return (
        longer
        if is_decisive and (not found.secondary or longer.outcome.is_out_of_memory)
        else found
    )


def classify_exit(ending: ProcessExit) -> Finding:
    """Return the finding of an exit: the kernel's report comes first, then the last output."""
    if ending.signal is not None:
        known = {one.value for one in signal.Signals}  # real-time signals have no name
        how = (
            "ended by"
            f" {signal.Signals(ending.signal).name if ending.signal in known else f'signal {ending.signal}'}"
        )
    else:
        how = (
            "ended with no result"
            if ending.exit is None
            else f"ended with exit code {ending.exit} and no result"
        )
    how = f"the process {how}"
    if ending.out_of_memory == "limit":
        return _memory(None, f"{how}: the memory limit was reached", ending.phase)
    if ending.out_of_memory == "machine" and ending.signal in (None, signal.SIGKILL):
        evidence = f"{how}: the machine ran out of memory"
        return Finding(
            outcome=Outcome.OOM_HOST, evidence=evidence, cause="host_ram", phase=ending.phase
        )
    found = _from_print(ending.printed, only_memory=True)
    if found is not None and ending.signal != signal.SIGKILL:
        return _finding(
            found, ReportedException(chain=(), phase=ending.phase, device=ending.device)
        )
    if ending.signal in OUTSIDE_SIGNALS:
        return ended_from_outside(how, ending)
    return Finding(outcome=Outcome.CRASH, evidence=how, phase=ending.phase)


def ended_from_outside(words: str, ending: ProcessExit) -> Finding:
    """Return the finding of a process that another one ended: an operator, a scheduler, or the
    kernel for the memory of others."""
    why = (
        "the machine's memory was used up by others"
        if ending.out_of_memory == "others"
        else "sent from outside the probe"
    )
    return Finding(
        outcome=Outcome.INTERRUPTED,
        evidence=f"{words}, {why}",
        phase=ending.phase,
        from_outside=True,
    )


def classify_launched(ending: ProcessExit, last_words: str) -> Finding:
    """Return the finding of a launched program: the kernel's report comes first, then printed
    exceptions, then the last output.

    The phase is taken from a traceback. Without one it stays unknown; it is not guessed to be the
    load.
    """
    if ending.out_of_memory in ("limit", "machine"):
        return _placed(classify_exit(ending), ending.phase)
    first: Finding | None = None
    for thrown in exceptions_in(ending.printed):
        found = classify_logged(thrown, ending.phase, ending.device)
        if found.cause is not None or found.outcome is not Outcome.CRASH:
            return _placed(found, ending.phase or phase_of(thrown.frames))
        first = first or found
    found = classify_exit(ending)
    if found.outcome.is_out_of_memory or found.from_outside:
        return _placed(found, ending.phase)
    return first or replace(found, evidence=f"{found.evidence}; its last words: {last_words}")


def _placed(found: Finding, phase: Phase | None) -> Finding:
    """Return the finding with its out-of-memory outcome set to the known phase."""
    if not found.outcome.is_out_of_memory or found.outcome is Outcome.OOM_HOST:
        return found
    outcome = Outcome.OOM_UNKNOWN if phase is None else Outcome.out_of_memory_in(phase)
    return replace(found, outcome=outcome, phase=phase)


def classify_line(line: str, *, is_error: bool) -> Finding | None:
    """Return the known failure that a single printed line reports.

    A line that its logger did not mark as an error must have words that a failure alone has.
    """
    lowered = line.lower()
    if not any(word in lowered for word in WORDS.of_rows):
        return None
    aborted = line.startswith(("terminate called", "  what():"))
    found = _first_match([line], _ERROR_ROWS if is_error or aborted else _LOUD_ROWS)
    return None if found is None else _finding(found, ReportedException(chain=(), device="cuda"))


def classify_quoted(
    exceptions: Sequence[str], lines: Sequence[str], frames: Sequence[str] = ()
) -> Finding | None:
    """Return the known failure of a short excerpt, whose lines are all there is: each may be the
    message.

    A place in the code belongs to an exception, not to any line.
    """
    for row in (*ROWS, *QUOTED_ROWS):
        if row.cause is not None or row.kind == "memory":
            texts = exceptions if row.raised_at is not None else (*exceptions, *lines)
            found = _first_match(texts, (row,), frames)
            if found is not None:
                return _finding(found, ReportedException(chain=(), frames=frames, device="cuda"))
    return None


def _first_match(
    texts: Sequence[str], rows: Sequence[FailureRow] = ROWS, frames: Sequence[str] = ()
) -> RowMatch | None:
    for row in rows:
        for text in texts:
            match = row.search(text, frames)
            if match is not None:
                return row, match
    return None


def _from_print(printed: str, *, only_memory: bool) -> RowMatch | None:
    """Search the output for the failure behind a wrapper. Otherwise memory rows alone count,
    because logs contain many warnings.
    """
    return _first_match(
        [printed],
        [row for row in ROWS if not row.secondary and (row.kind == "memory" or not only_memory)],
    )


def _finding(found: RowMatch, raised: ReportedException) -> Finding:
    row, match = found
    start, end = (
        match.string.rfind("\n", 0, match.start()) + 1,
        match.string.find("\n", match.end()),
    )
    evidence, phase = (
        _one_line(match.string[start : end if end >= 0 else None]),
        row.phase or raised.phase,
    )
    numbers = numbers_of(match, evidence)
    if row.kind == "host_memory" or (row.on_host and raised.device == "cuda"):
        return Finding(
            outcome=Outcome.OOM_HOST,
            evidence=evidence,
            cause="host_ram",
            phase=phase,
            numbers=numbers,
            row=row.name,
        )
    if row.kind == "memory":
        return _memory(row, evidence, phase, raised.frames, numbers)
    return Finding(
        outcome=Outcome.ILLEGAL if row.kind == "illegal" else Outcome.CRASH,
        evidence=evidence,
        cause=row.cause,
        phase=phase,
        numbers=numbers,
        row=row.name,
        secondary=row.secondary,
        transient=row.kind == "transient",
    )


def _memory(
    row: FailureRow | None,
    evidence: str,
    phase: Phase | None,
    frames: Sequence[str] = (),
    numbers: Numbers | None = None,
) -> Finding:
    """Return the finding for memory that ran out: its cause is the row's, or follows from
    frames, figures and phase.
    """
    numbers, name = numbers or {}, row.name if row else None
    idle, asked, total = (
        numbers.get(figure) for figure in ("idle_bytes", "asked_bytes", "total_bytes")
    )
    if name == "cuda_other_process":
        cause = "gpu_other_process"
    elif row is not None and row.cause:
        cause = row.cause
    # A cache that is joined anew at each token leaves its former pieces idle behind: they come with
    # it.
    elif (
        (needs := cause_of(frames)) != "kv_cache"
        and idle
        and asked
        and total
        and idle >= max(asked, FRAGMENTED_SHARE * total)
    ):
        cause = "fragmentation"
    else:
        cause = needs or _BY_PHASE.get(phase or "", "unknown_memory")
    # Before the first phase is reported, the trainer is under construction: part of the load.
    outcome = Outcome.out_of_memory_in(phase or "load")
    return Finding(
        outcome=outcome,
        evidence=evidence,
        cause=cause,
        phase=phase or "load",
        numbers=numbers,
        row=name,
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:600]


_IMPORT_ERROR = re.compile(r"\b(?:ModuleNotFoundError|ImportError|PackageNotFoundError)\b")


def depends_on_candidate(failure: Failure) -> bool:
    """Return False for a failure that no other candidate can avoid: the import of a package that
    all of them need.
    """
    if failure.cause != "version" or not _IMPORT_ERROR.search(failure.evidence):
        return True
    return _optional_packages().search(f"{failure.evidence}\n{failure.excerpt}") is not None


@functools.cache
def _optional_packages() -> re.Pattern[str]:
    names = "|".join(re.escape(name) for name in read_table("optional_packages", list[str]))
    return re.compile(rf"(?<![A-Za-z0-9])(?:{names})(?![A-Za-z0-9])")

"""Classification of a run that failed: an exception, an exit without one, or a launched program."""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune.core.job import DeviceKind
from autotune.core.measurement import Failure, Outcome, Phase
from autotune.failures.findings import Finding, ProcessExit, ReportedException
from autotune.failures.numbers import Numbers, numbers_of
from autotune.failures.table import (
    FAILURE_ROWS,
    WORDS,
    FailureRow,
    cause_of,
    phase_of,
    read_table,
)
from autotune.failures.tracebacks import LoggedException, exceptions_in

# Share of the device from which idle reserved memory, enough for the request, counts as
# fragmentation. Every GPU that is full has up to this share of idle pieces.
FRAGMENTED_SHARE = 0.1

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

_LOUD_ROWS = tuple(row for row in FAILURE_ROWS if row.read_in == "any line")
_ERROR_ROWS = tuple(row for row in FAILURE_ROWS if row.read_in != "exception")
_BY_PLACE = frozenset(row.name for row in FAILURE_ROWS if row.raised_at is not None)

# Signals that a process does not send to itself: from an operator, a scheduler or the kernel.
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Row of the messages about a killed process, which do not name a memory limit.
HOST_KILLED = "host_killed"

RowMatch = tuple[FailureRow, re.Match[str]]


def classify_exception(raised: ReportedException) -> Finding:
    """Return the finding of the first row that matches; a text without a row is a crash."""
    texts = [f"{kind}: {text}" for kind, text in raised.chain]
    match = _first_match(texts, frames=raised.frames)
    if match is None or match[0].secondary:
        decisive = _from_print(raised.printed, only_memory=match is None)
        match = decisive or match
    is_indecisive = match is None or match[0].secondary
    if raised.limit_hit and is_indecisive:
        finding = _limit_hit(raised)
        return replace(finding, secondary=match is not None)
    if match is None:
        text = texts[0] if texts else "no error was reported"
        evidence = _one_line(text)
        return Finding(
            outcome=Outcome.CRASH,
            evidence=evidence,
            phase=raised.phase,
        )
    return _finding(match, raised)


def _limit_hit(raised: ReportedException) -> Finding:
    evidence = "the kernel ended a process of the tree for want of memory"
    if raised.device == "cuda":  # no kernel counts a device's memory: it was the machine's
        return _host_memory(evidence, raised.phase)
    return _memory(None, evidence, raised.phase, raised.frames)


def classify_logged(
    thrown: LoggedException,
    phase: Phase | None,
    device: DeviceKind,
) -> Finding:
    """Return the finding of an exception read from a log. The lines behind it are added when the
    exception alone is not decisive.
    """

    def classified(message: str) -> Finding:
        raised = ReportedException(
            chain=((kind, message),),
            frames=thrown.frames,
            phase=phase,
            device=device,
        )
        return classify_exception(raised)

    kind, _, message = thrown.text.partition(": ")
    finding = classified(message)
    if _is_decisive(finding) or not thrown.continuation:
        return finding
    longer = classified(f"{message}\n{thrown.continuation}")
    # Behind an echo, only memory counts as its cause: libraries list general remarks there.
    counts = not finding.secondary or longer.outcome.is_out_of_memory
    return longer if _is_decisive(longer) and counts else finding


def _is_decisive(finding: Finding) -> bool:
    """Return True if the words of the exception itself are known."""
    is_by_place = finding.row in _BY_PLACE
    return finding.row is not None and not finding.secondary and not is_by_place


def classify_exit(ending: ProcessExit) -> Finding:
    """Return the finding of an exit: the kernel's report comes first, then the last output."""
    evidence = f"the process {_how_it_ended(ending)}"
    if ending.out_of_memory == "limit":
        return _memory(None, f"{evidence}: the memory limit was reached", ending.phase)
    may_be_kernels = ending.signal in (None, signal.SIGKILL)
    if ending.out_of_memory == "machine" and may_be_kernels:
        return _host_memory(f"{evidence}: the machine ran out of memory", ending.phase)
    match = _from_print(ending.printed, only_memory=True)
    if match is not None and ending.signal != signal.SIGKILL:
        raised = ReportedException(
            chain=(),
            phase=ending.phase,
            device=ending.device,
        )
        return _finding(match, raised)
    if ending.signal in OUTSIDE_SIGNALS:
        return ended_from_outside(evidence, ending)
    return Finding(
        outcome=Outcome.CRASH,
        evidence=evidence,
        phase=ending.phase,
    )


def _how_it_ended(ending: ProcessExit) -> str:
    if ending.signal is not None:
        return f"ended by {_signal_name(ending.signal)}"
    if ending.exit is None:
        return "ended with no result"
    return f"ended with exit code {ending.exit} and no result"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def ended_from_outside(event: str, ending: ProcessExit) -> Finding:
    """Return the finding of a process that another one ended: an operator, a scheduler, or the
    kernel for the memory of others.
    """
    reason = "sent from outside the probe"
    if ending.out_of_memory == "others":
        reason = "the machine's memory was used up by others"
    return Finding(
        outcome=Outcome.INTERRUPTED,
        evidence=f"{event}, {reason}",
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
    first_crash: Finding | None = None
    for thrown in exceptions_in(ending.printed):
        finding = classify_logged(thrown, ending.phase, ending.device)
        is_known = finding.cause is not None or finding.outcome is not Outcome.CRASH
        if is_known:
            phase = ending.phase or phase_of(thrown.frames)
            return _placed(finding, phase)
        if first_crash is None:
            first_crash = finding
    finding = classify_exit(ending)
    if finding.outcome.is_out_of_memory or finding.from_outside:
        return _placed(finding, ending.phase)
    if first_crash is not None:
        return first_crash
    return replace(finding, evidence=f"{finding.evidence}; its last words: {last_words}")


def _placed(finding: Finding, phase: Phase | None) -> Finding:
    """Return the finding with its out-of-memory outcome set to the known phase."""
    is_device_memory = finding.outcome.is_out_of_memory and finding.outcome is not Outcome.OOM_HOST
    if not is_device_memory:
        return finding
    outcome = Outcome.OOM_UNKNOWN
    if phase is not None:
        outcome = Outcome.out_of_memory_in(phase)
    return replace(finding, outcome=outcome, phase=phase)


def classify_line(line: str, *, is_error: bool) -> Finding | None:
    """Return the known failure that a single printed line reports.

    A line that its logger did not mark as an error must have words that a failure alone has.
    """
    lowered = line.lower()
    if not any(word in lowered for word in WORDS.of_rows):
        return None
    is_abort = line.startswith(("terminate called", "  what():"))
    rows = _ERROR_ROWS if is_error or is_abort else _LOUD_ROWS
    match = _first_match([line], rows)
    if match is None:
        return None
    raised = ReportedException(chain=(), device="cuda")
    return _finding(match, raised)


def classify_quoted(
    exceptions: Sequence[str],
    lines: Sequence[str],
    frames: Sequence[str],
    rows: Sequence[FailureRow],
) -> Finding | None:
    """Return the known failure of a short excerpt, whose lines are all there is: each may be the
    message.

    A place in the code belongs to an exception, not to any line.
    """
    for row in rows:
        if row.cause is None and row.kind != "memory":
            continue
        texts = list(exceptions)
        if row.raised_at is None:
            texts += lines
        match = _first_match(texts, (row,), frames)
        if match is not None:
            raised = ReportedException(
                chain=(),
                frames=frames,
                device="cuda",
            )
            return _finding(match, raised)
    return None


def _first_match(
    texts: Sequence[str],
    rows: Sequence[FailureRow] = FAILURE_ROWS,
    frames: Sequence[str] = (),
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
    rows = [row for row in FAILURE_ROWS if not row.secondary]
    if only_memory:
        rows = [row for row in rows if row.kind == "memory"]
    return _first_match([printed], rows)


def _finding(row_match: RowMatch, raised: ReportedException) -> Finding:
    row, match = row_match
    evidence = _one_line(_matched_lines(match))
    numbers = numbers_of(match, evidence)
    phase = row.phase or raised.phase
    is_on_host = row.on_host and raised.device == "cuda"
    if row.kind == "host_memory" or is_on_host:
        finding = _host_memory(evidence, phase)
        return replace(finding, numbers=numbers, row=row.name)
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


def _matched_lines(match: re.Match[str]) -> str:
    """Return the whole lines around a match."""
    line_end = match.string.rfind("\n", 0, match.start())
    start = line_end + 1
    end = match.string.find("\n", match.end())
    if end < 0:
        return match.string[start:]
    return match.string[start:end]


def _host_memory(evidence: str, phase: Phase | None) -> Finding:
    return Finding(
        outcome=Outcome.OOM_HOST,
        evidence=evidence,
        cause="host_ram",
        phase=phase,
    )


def _memory(
    row: FailureRow | None,
    evidence: str,
    phase: Phase | None,
    frames: Sequence[str] = (),
    numbers: Numbers | None = None,
) -> Finding:
    """Return the finding for memory that ran out: its cause is the row's, or derived from
    frames, figures and phase.
    """
    numbers = numbers or {}
    if row is not None and row.name == "cuda_other_process":
        cause = "gpu_other_process"
    elif row is not None and row.cause:
        cause = row.cause
    else:
        cause = _purpose(frames, numbers, phase)
    # Before the first phase is reported, the trainer is under construction: part of the load.
    phase = phase or "load"
    return Finding(
        outcome=Outcome.out_of_memory_in(phase),
        evidence=evidence,
        cause=cause,
        phase=phase,
        numbers=numbers,
        row=None if row is None else row.name,
    )


def _purpose(
    frames: Sequence[str],
    numbers: Numbers,
    phase: Phase | None,
) -> str:
    purpose = cause_of(frames)
    # A cache that is joined anew at each token leaves its former pieces idle behind: they come with
    # it.
    if purpose != "kv_cache" and _is_fragmented(numbers):
        return "fragmentation"
    by_phase = _BY_PHASE.get(phase or "", "unknown_memory")
    return purpose or by_phase


def _is_fragmented(numbers: Numbers) -> bool:
    idle = numbers.get("idle_bytes")
    requested_bytes = numbers.get("asked_bytes")
    total = numbers.get("total_bytes")
    if not idle or not requested_bytes or not total:
        return False
    return idle >= max(requested_bytes, FRAGMENTED_SHARE * total)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line[:600]


_IMPORT_ERROR = re.compile(r"\b(?:ModuleNotFoundError|ImportError|PackageNotFoundError)\b")


def depends_on_candidate(failure: Failure) -> bool:
    """Return False for a failure that no other candidate can avoid: the import of a package that
    all of them need.
    """
    is_import_error = _IMPORT_ERROR.search(failure.evidence)
    if failure.cause != "version" or not is_import_error:
        return True
    return _optional_packages().search(f"{failure.evidence}\n{failure.excerpt}") is not None


@functools.cache
def _optional_packages() -> re.Pattern[str]:
    packages = read_table("optional_packages", list[str])
    names = "|".join(map(re.escape, packages))
    return re.compile(rf"(?<![A-Za-z0-9])(?:{names})(?![A-Za-z0-9])")

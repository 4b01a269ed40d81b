"""What became of a run that did not end well: an exception in words, or an end without any."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from autotune.failures.frames import cause_of
from autotune.failures.log import read_line
from autotune.failures.numbers import Numbers, numbers_of
from autotune.failures.rows import ROWS
from autotune.failures.table import Row
from autotune.failures.tracebacks import Thrown, Told, Tracebacks
from autotune.hardware import DeviceKind
from autotune.measurement import Outcome, Phase

FRAGMENTED_SHARE = 0.1
"""Idle memory that would have sufficed in one piece explains a failure where it is so much of the device: up to that much is
lost on any GPU that is full, whatever it is full of."""

_BY_PHASE: Mapping[str, str] = {
    "load": "weights", "rollout": "unknown_memory", "sync": "weight_sync", "reward": "unknown_memory", "score": "activations",
    "forward": "activations", "backward": "activations", "optimizer": "optimizer",
}  # fmt: skip


_LOUD_ROWS = tuple(row for row in ROWS if row.said == "anywhere")
_ERROR_ROWS = tuple(row for row in ROWS if row.said != "raised")
_BY_PLACE = frozenset(row.name for row in ROWS if row.places is not None)
_LINE_WORDS = (
    "memory", "kv cache", "killed", "-9", "sigkill", "alloc", "oom", "worker unexpectedly", "watchdog", "peer", "broken pipe",
    "timeout", "timed out", "nccl", "cuda", "device-side", "launch failure", "ecc", "remote process", "engine", "workerproc",
    ": error: ", "not used by", "override", "struct", "config", "hydra", "mandatory", "resource", "xid", "gpu", "cudnn", "cublas",
    "target", "failure", "triton", "misaligned", "illegal instruction", "objectstore", "shm", "workers killed", "137", "signal 9",
    "no such option", "error: ", "could not consume", "unrecognized", "can't open file", "assertion", "oom", "reaped", "low on",
    "memlimit", "device driver", "connection refused", "pair closure", "dump signal", "mem", "background loop", "shutting down",
    "no module named", "mismatched input", "could not find '", "no available node",
    "loss is", "norm is", "loss became", "loss was", "insufficient", "command not found", "/usr/bin/env", "container-cli",
)  # fmt: skip
"""One of these is in every line that a row of them matches: most lines are settled by this alone."""


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An exception, as a rank described it."""

    chain: Sequence[tuple[str, str]]
    """Type and text of what was raised, then of what had caused that, and so on."""

    frames: Sequence[str] = ()
    """`file:function`, innermost last."""

    phase: Phase | None = None
    device: DeviceKind = "cpu"
    limit_hit: bool = False
    """Whether the kernel ended some process of the tree for want of memory meanwhile."""

    printed: str = ""
    """What the processes of the rig printed: the root of what only a wrapper was raised for."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A process that ended without a word."""

    signal: int | None = None
    exit: int | None = None
    phase: Phase | None = None
    device: DeviceKind = "cpu"
    out_of_memory: Literal["limit", "machine"] | None = None
    """Whose memory ran out, where the kernel says that it did: the limit's, or the whole machine's."""

    printed: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What became of it."""

    outcome: Outcome
    evidence: str
    """The one line that decided it."""

    cause: str | None = None
    phase: Phase | None = None
    numbers: Numbers = field(default_factory=dict)
    """What the message measured itself; `numbers.NUMBERS` says what each means."""

    row: str | None = None
    """The row of the table that matched."""

    secondary: bool = False
    """True where another process probably failed first."""

    transient: bool = False
    """True where it says nothing about the candidate."""


def judge_raised(raised: Raised) -> Finding:
    """By the table; what the table does not know is a crash."""
    texts = [f"{kind}: {text}" for kind, text in raised.chain]
    found = _first_match(texts, frames=raised.frames)
    if found is None or found[0].secondary:
        found = _from_print(raised.printed, only_memory=found is None) or found
    if raised.limit_hit and (found is None or found[0].secondary):
        words = "the kernel ended a process of the tree for want of memory"
        if raised.device == "cuda":  # no kernel counts a device's memory: it was the machine's
            host = Finding(outcome=Outcome.OOM_HOST, evidence=words, cause="host_ram", phase=raised.phase)
            return replace(host, secondary=found is not None)
        blamed = _memory(None, words, raised.phase, raised.device, raised.frames, {})
        return replace(blamed, secondary=found is not None)
    if found is None:
        return Finding(outcome=Outcome.CRASH, evidence=_one_line(texts[0] if texts else "no error was told"), phase=raised.phase)
    row, match = found
    return _finding(row, match, raised)


def judge_thrown(thrown: Thrown, phase: Phase | None, device: DeviceKind) -> Finding:
    """The same of what was read from a log. Lines behind it that may be its own count where it says too little itself."""
    kind, _, words = thrown.text.partition(": ")
    found = judge_raised(Raised(chain=((kind, words),), frames=thrown.frames, phase=phase, device=device))
    if not thrown.more or not (found.row is None or found.secondary or found.row in _BY_PLACE):
        return found
    words = f"{words}\n{thrown.more}"
    longer = judge_raised(Raised(chain=((kind, words),), frames=thrown.frames, phase=phase, device=device))
    if longer.row is None or longer.secondary or longer.row in _BY_PLACE:
        return found
    # Of an echo only memory is believed to be its root: what libraries list behind it are their general remarks.
    return found if found.secondary and not longer.outcome.is_out_of_memory else longer


def judge_ending(ending: Ending) -> Finding:
    """By the kernel's word first, then by the last words that were printed."""
    if ending.out_of_memory == "limit":
        return _memory(None, f"{_how(ending)}: the memory limit was reached", ending.phase, ending.device, (), {})
    if ending.out_of_memory == "machine" and ending.signal in (None, signal.SIGKILL):
        evidence = f"{_how(ending)}: the machine ran out of memory"
        return Finding(outcome=Outcome.OOM_HOST, evidence=evidence, cause="host_ram", phase=ending.phase)
    found = _from_print(ending.printed, only_memory=True)
    if found is not None and ending.signal != signal.SIGKILL:
        return _finding(*found, Raised(chain=(), phase=ending.phase, device=ending.device))
    why = ", ended by somebody else" if ending.signal == signal.SIGKILL else ""
    return Finding(outcome=Outcome.CRASH, evidence=_how(ending) + why, phase=ending.phase)


def read_log(text: str, device: DeviceKind = "cuda") -> Finding | None:
    """The first known failure in a text; None where nothing is known."""
    raised = [thrown for told in _exceptions_in(text) if told.has_traceback for thrown in told.chain]
    for thrown in raised:
        found = _first_match([thrown.text], frames=thrown.frames)
        if found is not None:
            return _finding(*found, Raised(chain=(), frames=thrown.frames, device=device))
    found = _first_match([text])
    return None if found is None else _finding(*found, Raised(chain=(), device=device))


def _exceptions_in(text: str) -> Iterator[Told]:
    tracebacks = Tracebacks()
    for position, line in enumerate(text.splitlines()):
        yield from tracebacks.feed(read_line(line), position)
    yield from tracebacks.flush()


def told_by_line(line: str, *, is_error: bool) -> Finding | None:
    """The known failure that a single printed line tells of, exception or not.

    Lines say much that is no failure. So one that its logger did not call an error must be in words that only a failure has.
    """
    lowered = line.lower()
    if not any(word in lowered for word in _LINE_WORDS):
        return None
    aborted = line.startswith(("terminate called", "  what():"))
    found = _first_match([line], _ERROR_ROWS if is_error or aborted else _LOUD_ROWS)
    return None if found is None else _finding(*found, Raised(chain=(), device="cuda"))


def _first_match(
    texts: Sequence[str], rows: Sequence[Row] = ROWS, frames: Sequence[str] = ()
) -> tuple[Row, re.Match[str]] | None:
    for row in rows:
        for text in texts:
            match = row.search(text, frames)
            if match is not None:
                return row, match
    return None


def _from_print(printed: str, *, only_memory: bool) -> tuple[Row, re.Match[str]] | None:
    """What was printed tells the root behind a wrapper. Otherwise only memory is believed: logs warn of much."""
    rows = [row for row in ROWS if not row.secondary and (row.kind == "memory" or not only_memory)]
    return _first_match([printed], rows)


def _finding(row: Row, match: re.Match[str], raised: Raised) -> Finding:
    evidence, phase = _line_around(match), row.phase or raised.phase
    numbers = numbers_of(match, evidence)
    on_host = row.kind == "host_memory" or (row.on_host and raised.device == "cuda")
    if row.kind == "memory" and not on_host:
        return _memory(row, evidence, phase, raised.device, raised.frames, numbers)
    if on_host:
        return Finding(outcome=Outcome.OOM_HOST, evidence=evidence, cause="host_ram", phase=phase, numbers=numbers, row=row.name)
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
    row: Row | None, evidence: str, phase: Phase | None, device: DeviceKind, frames: Sequence[str], numbers: Numbers
) -> Finding:
    cause = (row.cause if row else None) or _cause(phase, frames, numbers)
    if row is not None and row.name == "cuda_other_process":
        cause = "gpu_other_process"
    # Before the first phase is heard of, what runs is the building of the trainer: part of the load.
    outcome = Outcome.out_of_memory_in(phase or "load")
    return Finding(
        outcome=outcome, evidence=evidence, cause=cause, phase=phase or "load", numbers=numbers, row=row.name if row else None
    )


def _cause(phase: Phase | None, frames: Sequence[str], numbers: Numbers) -> str:
    idle, asked, total = (numbers.get(name) for name in ("idle_bytes", "asked_bytes", "total_bytes"))
    needs = cause_of(frames)
    if needs == "kv_cache":
        # A cache that is joined anew at each token leaves its former pieces idle behind: they come with it.
        return needs
    if idle and asked and total and idle >= max(asked, FRAGMENTED_SHARE * total):
        return "fragmentation"
    return needs or _BY_PHASE.get(phase or "", "unknown_memory")


def _line_around(match: re.Match[str]) -> str:
    text = match.string
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.end())
    return _one_line(text[start : end if end >= 0 else len(text)])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:600]


def _name_of(number: int) -> str:
    """Real-time signals have no name of their own."""
    return signal.Signals(number).name if number in {known.value for known in signal.Signals} else f"signal {number}"


def _how(ending: Ending) -> str:
    if ending.signal is not None:
        return f"the process was ended by {_name_of(ending.signal)}"
    if ending.exit is not None:
        return f"the process ended with exit code {ending.exit} and no result"
    return "the process ended with no result"

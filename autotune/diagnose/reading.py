"""What failed first, read from any training log.

Several processes print at once, and when one is gone the others complain about that. So each exception is put together from
the lines of its own process and judged by the table in `failures/`; then the earliest decides that is no mere echo of another:

    an exception, or words of memory running out  >  a known error without a traceback  >  a lost peer  >  a wrapper

What the run went on after (more steps were logged, or training finished) is not what ended it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from autotune.diagnose.diagnosis import Diagnosis
from autotune.failures import (
    MEMORY_CAUSES,
    ROWS,
    Finding,
    Line,
    Raised,
    Thrown,
    Told,
    Tracebacks,
    judge_raised,
    phase_of,
    read_line,
    remarks_in,
    told_by_line,
)
from autotune.measurement import Outcome, Phase

STEPS_SURVIVED = 3
"""So many steps logged after an error: it was dealt with. Fewer may be other ranks', printed late."""

STEPS_OF_NO_NUMBERS = 3
"""So many steps in a row whose loss or gradient is no number: it does not come back from that."""

MOST_REMARKS = 5


class _Tier(IntEnum):
    """How much a finding tells, the most first."""

    ROOT = 0
    BARE = 1
    """A known error that is no memory's and has no traceback: perhaps only printed."""

    ECHO = 2
    """A lost peer: another process probably failed first."""

    WRAPPER = 3
    """Says only that something failed."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    tier: _Tier
    position: int
    rank: int | None
    finding: Finding
    phase: Phase | None


# Only a line with one of these words can begin or end anything: most are settled by this alone.
_TELLING = (
    "error", "exception", "traceback", "memory", "killed", "terminate called", "watchdog", "nccl", "exitcode", "return code",
    "signal", "interrupt", "limitforeseen", "worker exit", "fault", "bus err", "broken pipe", "failures:", "root cause",
    "rank   ", "====", 'file "', "cancelled", "xid", "gpu has", "not used by", "oom", "resource", "could not override", "╭",
    "in struct", "call to target", "failure",
)  # fmt: skip
_REMARKABLE = ("preempt", "unsloth", "standby")
_PROGRESS = ("loss", "step:", "train_runtime", "train metrics", "training")
_STEP = re.compile(r"""['"](?:train/|actor/|critic/)?(?:loss|pg_loss|reward)['"]\s*:|\bstep:\d+ - """)
_FINISHED = re.compile(
    r"""\s*\{.{0,2000}['"]train_runtime['"]|\W*train metrics \*+|\W*(?:finished|completed) training\b"""
    r"""|\W*training (?:is |has )?(?:been )?(?:completed?|finished|done)\b(?! with err)""",
    re.IGNORECASE,
)
_WRAPPERS = re.compile(
    r"(?:[\w.]+\.)?(?:ChildFailedError|CalledProcessError|RayTaskError(?:\(\w+\))?|ActorDiedError|RayActorError|ActorUnavailableError"
    r"|WorkerCrashedError|ProcessRaisedException|ProcessExitedException|SignalException|SystemExit|TrainingFailedError|BrokenProcessPool)\b"
)
_FAULT = re.compile(
    r"failed \(exitcode: -(?:4|7|8|11)\)|^Segmentation fault|^Bus error|CANCELLED AT \S+ DUE TO |job killed: (?:walltime|cput)"
)
"""A process that ended by a fault of its own without a word, or that its scheduler ended: what peers say is an echo of that."""

_NO_NUMBER = re.compile(
    r"""(?:['"](?:[\w/]{0,40}/)?(?:loss|grad_norm)['"]: ?['"]?|actor/(?:pg_loss|grad_norm):)nan\b""", re.IGNORECASE
)

_LAUNCHERS_RANK = re.compile(r"\s*rank\s*: (\d{1,6}) \(local_rank: \d+\)")
_RANK_IN_WORDS = re.compile(r"\[(?:PG .{0,60} )?Rank (\d{1,6})\]", re.IGNORECASE)


class Reader:
    """One pass over the lines; it keeps the earliest finding of each tier, so that its size does not grow with the log."""

    def __init__(self) -> None:
        self._tracebacks = Tracebacks()
        self._found: dict[_Tier, _Found] = {}
        self._survived: dict[_Tier, _Found] = {}
        self._steps_since = 0
        self._finished = ""
        self._last = ""
        self._section = ""
        self._first_to_fail: int | None = None
        self._no_numbers: list[str] = []
        self._remarks: dict[str, None] = {}

    def feed(self, raw: str, position: int) -> None:
        if raw.strip():
            self._last = raw
        lowered = raw.lower()
        if self._tracebacks.busy or any(word in lowered for word in _TELLING):
            self._read(read_line(raw), position)
        if any(word in lowered for word in _PROGRESS):
            self._watch_progress(raw)
        if any(word in lowered for word in _REMARKABLE) and len(self._remarks) < MOST_REMARKS:
            self._remarks |= {said: None for said in [remarks_in(raw)] if said is not None}

    def _read(self, line: Line, position: int) -> None:
        if self._in_launchers_summary(line.text):
            return
        for told in self._tracebacks.feed(line, position):
            self._keep(_judge(told))
        if line.level == "lower" or self._tracebacks.holds(line):
            return
        finding = told_by_line(line.text, is_error=line.level == "error")
        if _FAULT.search(line.text) is not None:
            finding = Finding(outcome=Outcome.CRASH, evidence=line.text)
            self._keep(_Found(tier=_Tier.ROOT, position=position, rank=line.rank, finding=finding, phase=None))
        elif finding is not None:
            self._keep(_found_in_line(finding, line, position))

    def conclude(self) -> Diagnosis:
        for told in self._tracebacks.flush():
            self._keep(_judge(told))
        remarks = tuple(self._remarks)
        if not self._found:
            return self._without_failure(remarks)
        best = self._found[min(self._found)]
        if best.tier >= _Tier.ECHO and _Tier.ROOT in self._survived:
            # Logs of several ranks, one behind the other: the root of these echoes stands before the others' steps.
            best = self._survived[_Tier.ROOT]
        return _diagnosis(best, best.rank if best.rank is not None else self._first_to_fail, remarks)

    def _without_failure(self, remarks: tuple[str, ...]) -> Diagnosis:
        if len(self._no_numbers) >= STEPS_OF_NO_NUMBERS:
            evidence = one_line(self._no_numbers[0])
            return Diagnosis(known=True, is_memory=False, cause="numeric", evidence=evidence, remarks=remarks)
        if self._finished:
            return Diagnosis(known=True, is_memory=False, cause="none", evidence=one_line(self._finished), remarks=remarks)
        return Diagnosis(known=False, evidence=one_line(self._last), remarks=remarks)

    def _keep(self, found: _Found) -> None:
        self._steps_since = 0
        known = self._found.get(found.tier)
        if known is None or found.position < known.position:
            self._found[found.tier] = found

    def _watch_progress(self, raw: str) -> None:
        finished = _STEP.search(raw) is None
        if not finished:
            self._watch_numbers(raw)
        if finished and _FINISHED.match(read_line(raw).text) is None:
            return
        self._finished = raw if finished else self._finished
        self._steps_since += 1
        if self._found and (finished or self._steps_since >= STEPS_SURVIVED):
            self._survived = {**self._found, **self._survived}
            self._found = {}

    def _watch_numbers(self, raw: str) -> None:
        if _NO_NUMBER.search(raw) is None:
            self._no_numbers = []
        elif len(self._no_numbers) < STEPS_OF_NO_NUMBERS:
            self._no_numbers.append(raw)

    def _in_launchers_summary(self, text: str) -> bool:
        """torchrun lists every process that it ended; only the first to fail is of interest."""
        stripped = text.strip()
        if stripped == "Failures:":
            self._section = "others"
        elif stripped.startswith("Root Cause (first observed failure)"):
            self._section = "first"
        elif stripped.startswith("====") or not self._section:
            self._section = ""
        elif self._section == "first" and (match := _LAUNCHERS_RANK.match(text)) is not None and self._first_to_fail is None:
            self._first_to_fail = int(match[1])
        return self._section == "others"


def _judge(told: Told) -> _Found:
    """A chain of exceptions: memory that ran out in it, else the first that the table knows, else the first that says anything.

    What is handled may be a harmless try, as of a package that can be done without; running out of memory never is.
    """
    judged = [_judge_one(told, thrown) for thrown in told.chain]
    known = [found for found in judged if found.tier is _Tier.ROOT and found.finding.row is not None]
    known.sort(key=lambda found: (not _is_memory(found.finding), _told_by_place_alone(found.finding)))
    return (known or sorted(judged, key=lambda found: found.tier is _Tier.WRAPPER))[0]


def _judge_one(told: Told, thrown: Thrown) -> _Found:
    phase = phase_of(thrown.frames)
    kind, _, words = thrown.text.partition(": ")
    finding = judge_raised(Raised(chain=((kind, words),), frames=thrown.frames, phase=phase, device="cuda"))
    return _Found(
        tier=_tier(finding, thrown.text, told.has_traceback),
        position=told.position,
        rank=told.rank,
        finding=finding,
        # Not the finding's own: a probe that has not told of a phase yet is loading, and a log may never tell of any.
        phase=_phase_of_row(finding) or phase,
    )


def _tier(finding: Finding, text: str, has_traceback: bool) -> _Tier:
    if finding.row is None:
        return _Tier.WRAPPER if _WRAPPERS.match(text) or not has_traceback else _Tier.ROOT
    if finding.secondary:
        return _Tier.ECHO if finding.cause is not None else _Tier.WRAPPER
    return _Tier.ROOT if has_traceback or _is_memory(finding) else _Tier.BARE


def _found_in_line(finding: Finding, line: Line, position: int) -> _Found:
    rank = _RANK_IN_WORDS.search(line.text)
    return _Found(
        tier=_tier(finding, line.text, has_traceback=False),
        position=position,
        rank=line.rank if line.rank is not None or rank is None else int(rank[1]),
        finding=finding,
        phase=_phase_of_row(finding),
    )


def _phase_of_row(finding: Finding) -> Phase | None:
    return next((row.phase for row in ROWS if row.name == finding.row), None)


def _told_by_place_alone(finding: Finding) -> bool:
    """Words that say nothing by themselves: what other words of the same chain say counts for more."""
    return any(row.places is not None for row in ROWS if row.name == finding.row)


def _is_memory(finding: Finding) -> bool:
    return finding.cause in MEMORY_CAUSES and not finding.transient


def _diagnosis(found: _Found, rank: int | None, remarks: tuple[str, ...]) -> Diagnosis:
    finding = found.finding
    known = finding.cause is not None
    return Diagnosis(
        known=known,
        is_memory=_is_memory(finding) if known else None,
        cause=finding.cause,
        phase=found.phase,
        rank=rank,
        evidence=one_line(finding.evidence),
        numbers=dict(finding.numbers) if known else {},
        remarks=remarks,
        row=finding.row if known else None,
    )


def one_line(text: str) -> str:
    """Fit to be shown: one line, without prefixes and without what a terminal would act on."""
    line = " ".join(read_line(text).text.split())
    return "".join(letter for letter in line if letter.isprintable())[:600].removesuffix(":")

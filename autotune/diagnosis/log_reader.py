"""First failure in a training log of any framework.

Several processes print at once, and when one exits the others report that. Therefore each exception
is assembled from the lines of its own process and classified by `failures/`. The earliest finding
of the best tier decides:

exception, or out-of-memory message  >  known error without a traceback  >  lost peer  >  wrapper

An error after which the run continued (more steps were logged, or training finished) did not end
it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from autotune.core.measurement import Outcome, Phase
from autotune.diagnosis.diagnosis import Diagnosis
from autotune.diagnosis.log_facts import GpuNeighbours, HostMemoryUsers, LogEndings
from autotune.failures.classify import Finding, classify_line, classify_logged
from autotune.failures.numbers import without_neighbours
from autotune.failures.own_code import called_back, is_installed
from autotune.failures.table import (
    FAILURE_ROWS,
    LINES,
    MEMORY_CAUSES,
    WORDS,
    FailureRow,
    expand,
    phase_of,
    warning_in,
)
from autotune.failures.tracebacks import (
    ExceptionChain,
    LoggedException,
    LogLine,
    Tracebacks,
    read_line,
)

STEPS_SURVIVED = 3
"""Number of steps logged after an error that show that it was handled. Fewer may come from other
ranks, printed late.
"""

MOST_REMARKS = 5
_BY_NAME = {row.name: row for row in FAILURE_ROWS}


class _Tier(IntEnum):
    """Information content of a finding, best first."""

    ROOT = 0
    BARE = 1  # known error other than memory, without a traceback: perhaps printed and handled
    ECHO = 2  # lost peer: another process probably failed first
    WRAPPER = 3  # message that something failed, and no more


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A finding that may be the decisive one, with its place in the log."""

    tier: _Tier
    position: int
    rank: int | None
    finding: Finding
    phase: Phase | None
    thrown: LoggedException | None = None  # with its frames
    is_whole: bool = True  # False for an exception whose traceback lacks its header


_WRAPPERS = re.compile(expand(LINES.wrappers))
_FAULT = re.compile(expand(LINES.fault))
_OF_ANOTHER = re.compile(expand(LINES.of_another), re.IGNORECASE)
_ABORT = re.compile(
    r"terminate called without an active exception"
    r"|exitcode: -6\b|exit code: -6\b|\bSIGABRT\b|\bSignal 6\b|\bAborted\b"
)

# Remark about threads that were still running when Python had ended.
ABORTED_AT_EXIT = (
    "A process aborted while it ended, after the training was complete: its results are written."
    " Calling torch.distributed.destroy_process_group() at the end of the script avoids most of"
    " these."
)

_CELLS = ("│", "┃", "║")

# Rank whose end a launcher reported first.
_LAUNCHERS_RANK = re.compile(r"\s*rank\s*: (\d{1,6}) \(local_rank: \d+\)")
_LAUNCHERS_WORD = re.compile(
    r"failed \(exitcode: -?\d+\) local_rank: (\d{1,6}) |^srun: error: \S+ tasks? (\d{1,6}):"
    r" (?!Terminated|Killed)"
)

_RANK_IN_WORDS = re.compile(r"\[(?:PG .{0,60} )?Rank (\d{1,6})\]", re.IGNORECASE)


class LogReader:
    """Single pass over the lines. It keeps the earliest finding of each tier, so that its size
    does not grow with the log.
    """

    def __init__(self) -> None:
        self._tracebacks = Tracebacks()
        self._earliest: dict[_Tier, _Candidate] = {}
        self._survived: dict[_Tier, _Candidate] = {}
        self._steps_since = 0
        self._has_steps = False
        self._ends = LogEndings()
        self._neighbours = GpuNeighbours()
        self._host_memory = HostMemoryUsers()
        self._last = ""
        self._last_position = 0
        self._section = ""
        self._first_to_fail: int | None = None
        self._aborted = False
        self._remarks: dict[str, None] = {}

    def feed(self, block: Sequence[tuple[int, str]], lowered: str) -> None:
        """Receive numbered lines; `lowered` is their whole text, and words that it lacks are in
        none of them.
        """
        failure_words = list(filter(lowered.__contains__, WORDS.telling))
        progress_words = list(filter(lowered.__contains__, WORDS.of_endings))
        for position, raw in block:
            self._feed_line(raw, position, failure_words, progress_words)

    def _feed_line(
        self,
        raw: str,
        position: int,
        failure_words: Sequence[str],
        progress_words: Sequence[str],
    ) -> None:
        if raw.strip():
            self._last = raw
            self._last_position = position
        lowered = raw.lower()
        self._neighbours.feed(raw, lowered)
        self._host_memory.feed(raw)
        may_be_failure = any(map(lowered.__contains__, failure_words))
        if self._tracebacks.busy or may_be_failure:
            self._read(read_line(raw), position)
        is_progress = any(map(lowered.__contains__, progress_words))
        if is_progress and self._ends.feed(raw, position):
            self._go_on()
        has_room = len(self._remarks) < MOST_REMARKS
        may_be_warning = any(map(lowered.__contains__, WORDS.of_warnings))
        if has_room and may_be_warning:
            warning = warning_in(raw)
            if warning is not None:
                self._remarks[warning] = None

    def _read(self, line: LogLine, position: int) -> None:
        # 1. What launchers say of their processes.
        is_abort = _ABORT.search(line.text) is not None
        self._aborted = self._aborted or is_abort
        if self._in_launchers_summary(line.text):
            return
        if self._first_to_fail is None:
            ended = _LAUNCHERS_WORD.search(line.text)
            if ended is not None:
                self._first_to_fail = int(ended[1] or ended[2])

        # 2. Exceptions that this line completes.
        for reported in self._tracebacks.feed(line, position):
            self._keep(_judge(reported))
        if line.level == "lower" or self._tracebacks.holds(line):
            return
        if line.text.lstrip().startswith(_CELLS):
            # A table with generated text, which may contain anything.
            return

        # 3. The line as a message.
        if _FAULT.search(line.text) is not None:
            self._keep(_crash(line, position))
            return
        finding = classify_line(line.text, is_error=line.level == "error")
        if finding is not None:
            message = _message(finding, line, position)
            self._keep(message)

    def conclude(self) -> Diagnosis:
        for reported in self._tracebacks.flush():
            self._keep(_judge(reported))
        remarks = tuple(self._remarks)
        if not self._earliest:
            return self._without_failure(remarks)

        # 1. The best finding, unless the log ended well in spite of it.
        first_tier = min(self._earliest)
        best = self._earliest[first_tier]
        if best.tier >= _Tier.ECHO and _Tier.ROOT in self._survived:
            # Logs of several ranks, concatenated: the first failure is before the steps of the
            # other ranks.
            best = self._survived[_Tier.ROOT]
        if best.finding.cause is None:
            caught = self._ends.caught_before(best.position)
            if caught:
                return _at_the_end("unknown_memory", caught, remarks)
            if self._only_aborted_at_exit(best):
                remarks = (ABORTED_AT_EXIT, *remarks)
                last_line = self._ends.without_failure
                ended_well = _at_the_end("none", last_line, remarks)
                return dataclasses.replace(ended_well, rank=best.rank)

        # 2. Its cause, with the processes that held the memory.
        finding = self._with_neighbours(best)
        rank = self._first_to_fail if best.rank is None else best.rank
        remarks = (*self._neighbours.remarks_without_list(finding), *remarks)
        if finding.cause == "gpu_other_process":
            on_device = self._neighbours.remarks_on_device(finding.evidence, rank)
            remarks = (*self._neighbours.remarks(finding.evidence), *on_device, *remarks)
        elif finding.cause == "host_ram":
            remarks = (*self._host_memory.remarks(), *remarks)
        elif finding.cause is None and best.thrown is not None:
            remarks = (*_remarks_on_own_code(best.thrown), *remarks)
        diagnosis = Diagnosis(
            known=False,
            phase=best.phase,
            rank=rank,
            evidence=one_line(finding.evidence),
            remarks=remarks,
        )
        if finding.cause is None:
            return diagnosis
        return dataclasses.replace(
            diagnosis,
            known=True,
            is_memory=finding.is_memory,
            cause=finding.cause,
            numbers=dict(finding.numbers),
            row=finding.row,
        )

    def _only_aborted_at_exit(self, best: _Candidate) -> bool:
        """Return True if training was complete and a process aborted while it ended."""
        is_abort = _ABORT.search(best.finding.evidence) is not None
        is_of_the_end = best.tier is _Tier.WRAPPER or is_abort
        return self._aborted and is_of_the_end and bool(self._ends.without_failure)

    @property
    def is_of_a_run(self) -> bool:
        """Return True if the log holds a step, a whole traceback or the crash of a process."""
        if self._has_steps or _Tier.ROOT in self._survived:
            return True
        for tier, candidate in self._earliest.items():
            has_frames = tier is _Tier.ROOT or candidate.thrown is not None
            if has_frames and candidate.is_whole:
                return True
        return False

    def _with_neighbours(self, candidate: _Candidate) -> Finding:
        """Return the finding with the owner of the missing memory: a foreign process, or another
        role of the job.
        """
        finding = candidate.finding
        thrown = candidate.thrown
        frames = () if thrown is None else thrown.frames
        neighbours = self._neighbours
        are_full = neighbours.leave_too_little(finding)
        if are_full or neighbours.hold_most_unseen(finding, frames):
            return dataclasses.replace(finding, cause="gpu_other_process")

        names_other = finding.row == "cuda_other_process"
        names_a_neighbour = finding.cause == "gpu_other_process" and names_other
        if thrown is None or not names_a_neighbour:
            return finding
        if not neighbours.are_own(finding.evidence, frames, candidate.phase):
            return finding

        # The neighbours are roles of this job: judge the message without them.
        own_part = dataclasses.replace(thrown, text=without_neighbours(thrown.text))
        reported = ExceptionChain(
            position=candidate.position,
            rank=candidate.rank,
            chain=(own_part,),
            has_traceback=True,
            is_whole=True,
        )
        finding_of_part = _judge(reported).finding
        return dataclasses.replace(
            finding_of_part,
            evidence=finding.evidence,
            numbers=finding.numbers,
        )

    def _without_failure(self, remarks: tuple[str, ...]) -> Diagnosis:
        if line := self._ends.without_numbers:
            return _at_the_end("numeric", line, remarks)
        if line := self._ends.without_failure:
            return _at_the_end("none", line, remarks)
        if line := self._ends.caught_before(self._last_position):
            return _at_the_end("unknown_memory", line, remarks)
        return Diagnosis(
            known=False,
            evidence=one_line(self._last),
            remarks=remarks,
        )

    def _keep(self, candidate: _Candidate) -> None:
        self._steps_since = 0
        earliest = self._earliest.get(candidate.tier)
        if earliest is None or candidate.position < earliest.position:
            self._earliest[candidate.tier] = candidate
            return
        is_bare = earliest.phase is None and earliest.thrown is None
        has_frames = candidate.thrown is not None
        if is_bare and has_frames and _is_the_same(earliest, candidate):
            # A library printed the message shortly before the exception with its frames.
            rank = candidate.rank if earliest.rank is None else earliest.rank
            self._earliest[candidate.tier] = dataclasses.replace(
                candidate, position=earliest.position, rank=rank
            )

    def _go_on(self) -> None:
        """Record one more step, or the end of training: earlier errors did not end the run."""
        self._steps_since += 1
        self._has_steps = True
        is_over = self._ends.finished_last or self._steps_since >= STEPS_SURVIVED
        if self._earliest and is_over:
            self._survived = {**self._earliest, **self._survived}
            self._earliest = {}

    def _in_launchers_summary(self, text: str) -> bool:
        """Return True inside torchrun's list of failed processes, of which the first to fail
        alone is of interest.
        """
        stripped = text.strip()
        if stripped == "Failures:":
            self._section = "others"
        elif stripped.startswith("Root Cause (first observed failure)"):
            self._section = "first"
        elif stripped.startswith("====") or not self._section:
            self._section = ""
        elif self._section == "first" and self._first_to_fail is None:
            failed_rank = _LAUNCHERS_RANK.match(text)
            if failed_rank is not None:
                self._first_to_fail = int(failed_rank[1])
        return self._section == "others"


def _crash(line: LogLine, position: int) -> _Candidate:
    return _Candidate(
        tier=_Tier.ROOT,
        position=position,
        rank=line.rank,
        finding=Finding(outcome=Outcome.CRASH, evidence=line.text),
        phase=None,
    )


def _message(
    finding: Finding,
    line: LogLine,
    position: int,
) -> _Candidate:
    """Return the candidate for a known message that was printed without a traceback."""
    rank = line.rank
    if rank is None:
        rank_in_words = _RANK_IN_WORDS.search(line.text)
        if rank_in_words is not None:
            rank = int(rank_in_words[1])
    return _Candidate(
        tier=_tier(finding, line.text, has_traceback=False),
        position=position,
        rank=rank,
        finding=finding,
        phase=_phase_of_row(finding),
    )


def _is_the_same(printed: _Candidate, raised: _Candidate) -> bool:
    if printed.finding.row == raised.finding.row:
        return True
    message = " ".join(printed.finding.evidence.split())
    if not message:
        return False
    texts = [raised.finding.evidence]
    if raised.thrown is not None:
        texts.append(f"{raised.thrown.text}\n{raised.thrown.continuation}")
    one_line_texts = [" ".join(text.split()) for text in texts]
    return any(message in text for text in one_line_texts)


def _judge(reported: ExceptionChain) -> _Candidate:
    """Return the decisive finding of a chain: memory, else the first known one, else the first that
    is no wrapper.

    A handled exception may be harmless, such as the import of an optional package. Running out of
    memory never is.
    """
    candidates = []
    classified = []
    for thrown in reported.chain:
        candidate = _candidate(thrown, reported)
        candidates.append(candidate)
        has_row = candidate.finding.row is not None
        if candidate.tier is _Tier.ROOT and has_row:
            classified.append(candidate)

    def weakness(candidate: _Candidate) -> tuple[bool, bool, bool]:
        return _weakness(candidate.finding)

    best = min(classified, key=weakness, default=None)
    if best is not None:
        # A framework's message may be about a fault in the user's own code, with which the chain
        # began.
        is_by_place = _row(best.finding).raised_at is not None
        if not (is_by_place and _began_in_own_code(reported, candidates[0])):
            return best
    return min(candidates, key=lambda candidate: candidate.tier is _Tier.WRAPPER)


def _candidate(thrown: LoggedException, reported: ExceptionChain) -> _Candidate:
    phase = phase_of(thrown.frames)
    finding = classify_logged(thrown, phase, "cuda")
    return _Candidate(
        tier=_tier(finding, thrown.text, reported.has_traceback),
        position=reported.position,
        rank=reported.rank,
        finding=finding,
        # Not the finding's phase: a probe without a reported phase is loading, but a log may
        # contain no phase at all.
        phase=_phase_of_row(finding) or phase,
        thrown=thrown,
        is_whole=reported.is_whole,
    )


def _remarks_on_own_code(thrown: LoggedException) -> Iterator[str]:
    place = called_back(thrown.frames)
    if place is not None:
        yield f"Your own code raised it: {place}. It fails every time with the same input."


def _began_in_own_code(reported: ExceptionChain, first: _Candidate) -> bool:
    """Return True if the chain's first exception is unknown and was raised in the user's code."""
    frames = reported.chain[0].frames
    if first.finding.row is not None or not frames:
        return False
    return not is_installed(frames[-1])


def _weakness(finding: Finding) -> tuple[bool, bool, bool]:
    """Sort key: memory first; then a message that itself names the memory's purpose, which is
    more exact than a place in the code; last what was known by its place alone.
    """
    row = _row(finding)
    is_by_place = row.raised_at is not None
    has_known_cause = row.cause not in (None, "unknown_memory")
    has_purpose = row.kind == "memory" and has_known_cause
    is_sure = has_purpose and not is_by_place
    return not finding.is_memory, not is_sure, is_by_place


def _tier(
    finding: Finding,
    text: str,
    has_traceback: bool,
) -> _Tier:
    if finding.row is None:
        first_line = text.partition("\n")[0]
        is_of_another = _WRAPPERS.match(text) or _OF_ANOTHER.search(first_line)
        if is_of_another or not has_traceback:
            return _Tier.WRAPPER
        return _Tier.ROOT
    if finding.secondary:
        if finding.cause is None:
            return _Tier.WRAPPER
        return _Tier.ECHO
    if has_traceback or finding.is_memory or _row(finding).decisive:
        return _Tier.ROOT
    return _Tier.BARE


def _row(finding: Finding) -> FailureRow:
    return _BY_NAME[finding.row or ""]


def _phase_of_row(finding: Finding) -> Phase | None:
    if finding.row is None:
        return None
    return _row(finding).phase


def _at_the_end(
    cause: str,
    line: str,
    remarks: tuple[str, ...],
) -> Diagnosis:
    """Return the diagnosis by the last lines: `unknown_memory` where a loop caught the error
    itself, so that its place is unknown.
    """
    is_memory = cause in MEMORY_CAUSES
    return Diagnosis(
        known=True,
        is_memory=is_memory,
        cause=cause,
        evidence=one_line(line),
        remarks=remarks,
    )


def one_line(text: str) -> str:
    """Return the text as one printable line without prefixes."""
    parts = read_line(text).text.split()
    line = " ".join(parts)
    printable = "".join(filter(str.isprintable, line))
    return printable[:600].removesuffix(":")

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

from autotune.diagnosis.diagnosis import Diagnosis
from autotune.diagnosis.failure_candidates import (
    ABORT,
    PROCESS_FAULT,
    EvidenceTier,
    FailureCandidate,
    crash_of,
    is_the_same,
    judged,
    message_of,
)
from autotune.diagnosis.gpu_neighbours import GpuNeighbours
from autotune.diagnosis.host_memory_users import HostMemoryUsers
from autotune.diagnosis.log_endings import LogEndings
from autotune.failures.classify import classify_line
from autotune.failures.findings import Finding
from autotune.failures.log_lines import LogLine, read_line
from autotune.failures.numbers import without_neighbours
from autotune.failures.own_code import called_back, ends_in_a_package
from autotune.failures.table import MEMORY_CAUSES, WORDS, warning_in
from autotune.failures.tracebacks import ExceptionChain, LoggedException, Tracebacks

STEPS_SURVIVED = 3
"""Number of steps logged after an error that show that it was handled. Fewer may come from other
ranks, printed late.
"""

MOST_REMARKS = 5
LINES_BEFORE_A_QUOTATION = 2  # in front of a quoted traceback; a log of a run begins otherwise

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


class LogReader:
    """Single pass over the lines. It keeps the earliest finding of each tier, so that its size
    does not grow with the log.
    """

    def __init__(self) -> None:
        self._tracebacks = Tracebacks()
        self._earliest: dict[EvidenceTier, FailureCandidate] = {}
        self._survived: dict[EvidenceTier, FailureCandidate] = {}
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
        is_abort = ABORT.search(line.text) is not None
        self._aborted = self._aborted or is_abort
        if self._in_launchers_summary(line.text):
            return
        if self._first_to_fail is None:
            ended = _LAUNCHERS_WORD.search(line.text)
            if ended is not None:
                self._first_to_fail = int(ended[1] or ended[2])

        # 2. Exceptions that this line completes.
        for reported in self._tracebacks.feed(line, position):
            self._keep(judged(reported))
        if line.is_remark or self._tracebacks.holds(line):
            return
        if line.text.lstrip().startswith(_CELLS):
            # A table with generated text, which may contain anything.
            return

        # 3. The line as a message.
        if PROCESS_FAULT.search(line.text) is not None:
            self._keep(crash_of(line, position))
            return
        finding = classify_line(line.text, is_error=line.level == "error")
        if finding is not None:
            message = message_of(finding, line, position)
            self._keep(message)

    def conclude(self) -> Diagnosis:
        for reported in self._tracebacks.flush():
            self._keep(judged(reported))
        remarks = tuple(self._remarks)
        if not self._earliest:
            return self._without_failure(remarks)

        # 1. The best finding, unless the log ended well in spite of it.
        first_tier = min(self._earliest)
        best = self._earliest[first_tier]
        if best.tier >= EvidenceTier.ECHO and EvidenceTier.ROOT in self._survived:
            # Logs of several ranks, concatenated: the first failure is before the steps of the
            # other ranks.
            best = self._survived[EvidenceTier.ROOT]
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
            remarks = (*self._neighbours.remarks(finding.evidence, rank), *remarks)
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

    def _only_aborted_at_exit(self, best: FailureCandidate) -> bool:
        """Return True if training was complete and a process aborted while it ended."""
        is_abort = ABORT.search(best.finding.evidence) is not None
        is_of_the_end = best.tier is EvidenceTier.WRAPPER or is_abort
        return self._aborted and is_of_the_end and bool(self._ends.without_failure)

    @property
    def is_of_a_run(self) -> bool:
        """Return True if the log holds a step, a whole traceback or the crash of a process."""
        if self._has_steps or EvidenceTier.ROOT in self._survived:
            return True
        for tier, candidate in self._earliest.items():
            has_frames = tier is EvidenceTier.ROOT or candidate.thrown is not None
            if has_frames and candidate.is_whole:
                return True
        return False

    @property
    def quoted_exception(self) -> list[str]:
        """Return the lines of the exception with whose traceback the text begins, where no row of
        the tables matches it; empty otherwise.
        """
        root = self._earliest.get(EvidenceTier.ROOT)
        if root is None or self._has_steps or root.position > LINES_BEFORE_A_QUOTATION:
            return []
        if root.thrown is None or not _is_unknown_in_a_package(root):
            return []
        return f"{root.thrown.text}\n{root.thrown.continuation}".splitlines()

    def _with_neighbours(self, candidate: FailureCandidate) -> Finding:
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
        finding_of_part = judged(reported).finding
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

    def _keep(self, candidate: FailureCandidate) -> None:
        self._steps_since = 0
        earliest = self._earliest.get(candidate.tier)
        if earliest is None or candidate.position < earliest.position:
            self._earliest[candidate.tier] = candidate
            return
        is_bare = earliest.phase is None and earliest.thrown is None
        has_frames = candidate.thrown is not None
        if is_bare and has_frames and is_the_same(earliest, candidate):
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


def _is_unknown_in_a_package(candidate: FailureCandidate) -> bool:
    """Return True if a package raised it in words that the tables of whole logs lack."""
    if candidate.thrown is None or candidate.finding.cause is not None:
        return False
    return ends_in_a_package(candidate.thrown.frames)


def _remarks_on_own_code(thrown: LoggedException) -> Iterator[str]:
    place = called_back(thrown.frames)
    if place is not None:
        yield f"Your own code raised it: {place}. It fails every time with the same input."


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

"""Exceptions and messages of a log that may be the decisive failure, weighed as evidence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from autotune.core.measurement import Outcome, Phase
from autotune.failures.classify import classify_logged
from autotune.failures.findings import Finding
from autotune.failures.log_lines import LogLine
from autotune.failures.own_code import is_installed
from autotune.failures.table import FAILURE_ROWS, LINES, FailureRow, expand, phase_of
from autotune.failures.tracebacks import ExceptionChain, LoggedException

_BY_NAME = {row.name: row for row in FAILURE_ROWS}


class EvidenceTier(IntEnum):
    """Information content of a finding, best first."""

    ROOT = 0
    BARE = 1  # known error other than memory, without a traceback: perhaps printed and handled
    ECHO = 2  # lost peer: another process probably failed first
    WRAPPER = 3  # message that something failed, and no more


@dataclass(frozen=True, kw_only=True)
class FailureCandidate:
    """A finding that may be the decisive one, with its place in the log."""

    tier: EvidenceTier
    position: int
    rank: int | None
    finding: Finding
    phase: Phase | None
    thrown: LoggedException | None = None  # with its frames
    is_whole: bool = True  # False for an exception whose traceback lacks its header


_WRAPPERS = re.compile(expand(LINES.wrappers))
PROCESS_FAULT = re.compile(expand(LINES.fault))
_OF_ANOTHER = re.compile(expand(LINES.of_another), re.IGNORECASE)
ABORT = re.compile(
    r"terminate called without an active exception"
    r"|exitcode: -6\b|exit code: -6\b|\bSIGABRT\b|\bSignal 6\b|\bAborted\b"
)
_RANK_IN_WORDS = re.compile(r"\[(?:PG .{0,60} )?Rank (\d{1,6})\]", re.IGNORECASE)


def crash_of(line: LogLine, position: int) -> FailureCandidate:
    return FailureCandidate(
        tier=EvidenceTier.ROOT,
        position=position,
        rank=line.rank,
        finding=Finding(outcome=Outcome.CRASH, evidence=line.text),
        phase=None,
    )


def message_of(
    finding: Finding,
    line: LogLine,
    position: int,
) -> FailureCandidate:
    """Return the candidate for a known message that was printed without a traceback."""
    rank = line.rank
    if rank is None:
        rank_in_words = _RANK_IN_WORDS.search(line.text)
        if rank_in_words is not None:
            rank = int(rank_in_words[1])
    return FailureCandidate(
        tier=_tier(finding, line.text, has_traceback=False),
        position=position,
        rank=rank,
        finding=finding,
        phase=_phase_of_row(finding),
    )


def is_the_same(printed: FailureCandidate, raised: FailureCandidate) -> bool:
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


def judged(reported: ExceptionChain) -> FailureCandidate:
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
        if candidate.tier is EvidenceTier.ROOT and has_row:
            classified.append(candidate)

    def weakness(candidate: FailureCandidate) -> tuple[bool, bool, bool]:
        return _weakness(candidate.finding)

    best = min(classified, key=weakness, default=None)
    if best is not None:
        # A framework's message may be about a fault in the user's own code, with which the chain
        # began.
        is_by_place = _row(best.finding).raised_at is not None
        if not (is_by_place and _began_in_own_code(reported, candidates[0])):
            return best
    return min(candidates, key=lambda candidate: candidate.tier is EvidenceTier.WRAPPER)


def _candidate(thrown: LoggedException, reported: ExceptionChain) -> FailureCandidate:
    phase = phase_of(thrown.frames)
    finding = classify_logged(thrown, phase, "cuda")
    return FailureCandidate(
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


def _began_in_own_code(reported: ExceptionChain, first: FailureCandidate) -> bool:
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
) -> EvidenceTier:
    if finding.row is None:
        first_line = text.partition("\n")[0]
        is_of_another = _WRAPPERS.match(text) or _OF_ANOTHER.search(first_line)
        if is_of_another or not has_traceback:
            return EvidenceTier.WRAPPER
        return EvidenceTier.ROOT
    if finding.secondary:
        if finding.cause is None:
            return EvidenceTier.WRAPPER
        return EvidenceTier.ECHO
    if has_traceback or finding.is_memory or _row(finding).decisive:
        return EvidenceTier.ROOT
    return EvidenceTier.BARE


def _row(finding: Finding) -> FailureRow:
    return _BY_NAME[finding.row or ""]


def _phase_of_row(finding: Finding) -> Phase | None:
    if finding.row is None:
        return None
    return _row(finding).phase

"""The end of a program that nobody watched from within: all there is are its exit and its last words.

Which phase it was in is known where a traceback tells it, and otherwise not: it is not called a load for want of a better word.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.failures.frames import phase_of
from autotune.failures.judge import Ending, Finding, judge_ending, judge_thrown
from autotune.failures.log import read_line
from autotune.failures.tracebacks import Thrown, Tracebacks
from autotune.measurement import Outcome, Phase


def judge_launched(ending: Ending, last_words: str) -> Finding:
    """By the kernel's word first, then by the exceptions it printed, then by its last words."""
    if ending.out_of_memory is not None:
        return _placed(judge_ending(ending), ending.phase)
    first: Finding | None = None
    for thrown in _exceptions(ending.printed):
        found = judge_thrown(thrown, ending.phase, ending.device)
        if found.cause is not None or found.outcome is not Outcome.CRASH:
            return _placed(found, ending.phase or phase_of(thrown.frames))
        first = first or found
    found = judge_ending(ending)
    if found.outcome.is_out_of_memory:
        return _placed(found, ending.phase)
    return first or replace(found, evidence=f"{found.evidence}; its last words: {last_words}")


def _exceptions(printed: str) -> list[Thrown]:
    tracebacks = Tracebacks()
    told = [one for position, line in enumerate(printed.splitlines()) for one in tracebacks.feed(read_line(line), position)]
    return [thrown for one in (*told, *tracebacks.flush()) if one.has_traceback for thrown in one.chain]


def _placed(found: Finding, phase: Phase | None) -> Finding:
    """Out of memory in the phase that is known; elsewhere the finding as it is."""
    if not found.outcome.is_out_of_memory or found.outcome is Outcome.OOM_HOST:
        return found
    outcome = Outcome.OOM_UNKNOWN if phase is None else Outcome.out_of_memory_in(phase)
    return replace(found, outcome=outcome, phase=phase)

"""Classification of a launched program, from its exit status and its last output.

The phase is taken from a traceback. Without one it stays unknown; it is not guessed to be the load.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.core.measurement import Outcome, Phase
from autotune.failures.classify import Finding, ProcessExit, classify_exit, classify_logged
from autotune.failures.frames import phase_of
from autotune.failures.log_lines import read_line
from autotune.failures.tracebacks import LoggedException, Tracebacks


def classify_launched(ending: ProcessExit, last_words: str) -> Finding:
    """Return the finding: the kernel's report comes first, then printed exceptions, then the last
    output."""
    if ending.out_of_memory in ("limit", "machine"):
        return _placed(classify_exit(ending), ending.phase)
    first: Finding | None = None
    for thrown in _exceptions(ending.printed):
        found = classify_logged(thrown, ending.phase, ending.device)
        if found.cause is not None or found.outcome is not Outcome.CRASH:
            return _placed(found, ending.phase or phase_of(thrown.frames))
        first = first or found
    found = classify_exit(ending)
    if found.outcome.is_out_of_memory or found.from_outside:
        return _placed(found, ending.phase)
    return first or replace(found, evidence=f"{found.evidence}; its last words: {last_words}")


def _exceptions(printed: str) -> list[LoggedException]:
    tracebacks = Tracebacks()
    reported = [one for position, line in enumerate(printed.splitlines()) for one in tracebacks.feed(read_line(line), position)]
    return [thrown for one in (*reported, *tracebacks.flush()) if one.has_traceback for thrown in one.chain]


def _placed(found: Finding, phase: Phase | None) -> Finding:
    """Return the finding with its out-of-memory outcome set to the known phase."""
    if not found.outcome.is_out_of_memory or found.outcome is Outcome.OOM_HOST:
        return found
    outcome = Outcome.OOM_UNKNOWN if phase is None else Outcome.out_of_memory_in(phase)
    return replace(found, outcome=outcome, phase=phase)

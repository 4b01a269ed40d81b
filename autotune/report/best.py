"""The best so far, written down as it comes: whoever ends the search, and however, finds something that works."""

from __future__ import annotations

from collections.abc import Callable

from autotune.errors import BadInput
from autotune.events import BestChanged, Event, Listener, Note
from autotune.question import Question
from autotune.recommendation import Recommendation
from autotune.report.certificate import certificate_lines
from autotune.units import format_bytes

Write = Callable[[Question, Recommendation], object]


def keeping_the_best(listener: Listener, write: Write) -> Listener:
    """The listener, and every new best into the output folder before the search goes on. What can't be written now is tried again
    at the end: a full disk must not cost the measurements."""

    def hear(event: Event) -> None:
        listener(event)
        if isinstance(event, BestChanged):
            try:
                write(event.question, event.answer)
            except BadInput as error:
                listener(Note(text=f"The best so far was not written down: {error}"))
            else:
                listener(Note(text=f"  written into {event.question.out}: works, and the best so far"))

    return hear


def head_lines(question: Question, answer: Recommendation) -> tuple[str, ...]:
    """What stands at the head of the recommended configuration: its certificate, or how far from one it is."""
    winner = answer.winner
    if answer.certificate is not None or winner is None or not answer.interrupted:
        return tuple(certificate_lines(question, answer.certificate))
    peak = winner.measurement.memory.peak_bytes
    memory = "" if peak is None else f", with a peak of {format_bytes(peak)} of {format_bytes(question.memory_limit_bytes)}"
    return (
        f"BEST SO FAR, after {answer.counts.probed} probes: one short probe at the longest lengths fitted{memory}.",
        "The search went on from here, or was ended; the longer probe that confirms a recommendation is still to come.",
    )

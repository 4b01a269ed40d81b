"""Best answer so far, written during the search, so that an aborted search leaves a working
configuration."""

from __future__ import annotations

from collections.abc import Callable

from autotune.core.answer import Recommendation
from autotune.core.errors import BadInput
from autotune.core.events import BestChanged, Event, Listener, Note
from autotune.core.job import Job
from autotune.core.units import format_bytes
from autotune.report.certificate import certificate_lines

Write = Callable[[Job, Recommendation], object]


def best_so_far_listener(listener: Listener, write: Write) -> Listener:
    """Wrap the listener to write every new best into the output folder. A failed write is
    reported and tried again at the end: a full disk must not end the search."""

    def receive(event: Event) -> None:
        listener(event)
        if isinstance(event, BestChanged):
            try:
                write(event.job, event.answer)
            except BadInput as error:
                listener(Note(text=f"The best so far was not written: {error}"))
            else:
                listener(Note(text=f"  written into {event.job.out}: works, and the best so far"))

    return receive


def head_lines(job: Job, answer: Recommendation) -> tuple[str, ...]:
    """Return the header of the recommended configuration: its certificate, or the evidence so
    far."""
    winner = answer.winner
    if answer.certificate is not None or winner is None or not answer.interrupted:
        return tuple(certificate_lines(job, answer.certificate))
    peak = winner.measurement.memory.peak_bytes
    memory = "" if peak is None else f", with a peak of {format_bytes(peak)} of {format_bytes(job.memory_limit_bytes)}"
    return (
        f"BEST SO FAR, after {answer.counts.probed} probes: one short probe at the longest lengths fitted{memory}.",
        "The search continued from here, or was ended; the longer probe that confirms a recommendation is still missing.",
    )

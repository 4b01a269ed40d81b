"""One trace in blocks, with the marks and the uses of modules that lie in each."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.predict.pieces.blocks import Span, spans_of
from autotune.trace import Mark, Trace, Usage


class Laid:
    """One trace in blocks, with what else happens in each."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events, self.spans = spans_of(trace)
        self.keys = [span.key for span in self.spans]
        self.where = [(0, 0)] * len(trace.sizes)
        for number, span in enumerate(self.spans):
            for offset, entry in enumerate(self.events[span.start : span.stop]):
                if entry > 0:
                    self.where[entry - 1] = (number, offset)
        self.marks = _by_block(self.spans, [(mark.event, mark) for mark in trace.marks])
        self.uses = _uses_by_block(self.spans, trace.usage)

    def of(self, span: Span) -> list[int]:
        return self.events[span.start : span.stop]

    def what(self, entry: int) -> tuple[int, int]:
        """Its size and what it is."""
        return self.trace.sizes[abs(entry) - 1], self.trace.parts[abs(entry) - 1]


def _by_block(spans: Sequence[Span], what: Sequence[tuple[int, Mark]]) -> list[list[tuple[int, Mark]]]:
    """Each with its place in its block."""
    found: list[list[tuple[int, Mark]]] = [[] for _ in spans]
    block = 0
    for event, one in what:
        while block + 1 < len(spans) and event >= spans[block].stop:
            block += 1
        found[block].append((event - spans[block].start, one))
    return found


def _uses_by_block(spans: Sequence[Span], usage: Usage | None) -> list[list[tuple[int, ...]]]:
    """As they are, with places in their block: what ends at a block's end belongs to it, what begins there to the next."""
    found: list[list[tuple[int, ...]]] = [[] for _ in spans]
    block = 0
    for use in usage.uses if usage else ():
        ends = use[1] in (2, 4, 5)
        while block + 1 < len(spans) and (use[0] > spans[block].stop or (use[0] == spans[block].stop and not ends)):
            block += 1
        found[block].append((use[0] - spans[block].start, *use[1:]))
    return found

"""Steps of a run, from what it prints: the bar of the trainer, or a numbered line of a step."""

from __future__ import annotations

import re
import statistics
from collections import deque
from typing import NamedTuple

from autotune.request.sources.length_sources import Step, printed_lengths

# A bar without words is that of transformers' trainers; loading and evaluation have words, or fewer
# steps than the training.
BAR = re.compile(
    r"(?:^|[\r\n])\s*(?:(?:Train|Training Progress)\s*:\s*)?\d+%\|[^|\n]*\|"
    r"\s*(?P<step>\d+)/(?P<total>\d+) \["
)
STEP_OF_TOTAL = re.compile(
    r"\bstep:(?P<verl>\d+) - "
    r"|['\"]global_step(?:/max_steps)?['\"]: ?['\"]?(?P<step>\d+)(?:/(?P<total>\d+))?"
)
MAX_DURATIONS = 50
MAX_LENGTHS = 256  # steps whose lengths are kept
MAX_LINE = 16_384


class PrintedStep(NamedTuple):
    """Step that is named in a text."""

    place: int  # in the text
    step: int
    total: int | None


class StepProgress:
    """Last step that was printed, and the usual time of one."""

    def __init__(self, now: float) -> None:
        self.step: int | None = None
        self.total: int | None = None
        self.since = now  # the time of the last new step
        self._durations: deque[float] = deque(maxlen=MAX_DURATIONS)

    def feed(self, text: str, now: float) -> bool:
        """Read newly printed text; return True for a new step."""
        for printed in _steps_in(text):
            if self._is_of_another_bar(printed):
                continue
            self.total = printed.total or self.total
            if self.step is None or printed.step > self.step:
                return self._advance(printed.step, now)
        return False

    def _is_of_another_bar(self, printed: PrintedStep) -> bool:
        """Return True for fewer steps than the training has: an evaluation."""
        if printed.total is None or self.total is None:
            return False
        return printed.total < self.total

    def reached(self, step: int, now: float) -> bool:
        """Note a step that a checkpoint shows."""
        return (self.step is None or step > self.step) and self._advance(step, now)

    def _advance(self, step: int, now: float) -> bool:
        if self.step is not None and step > self.step:
            self._durations.append((now - self.since) / (step - self.step))
        self.step = step
        self.since = now
        return True

    @property
    def usual_seconds(self) -> float | None:
        """Return the median time of a step; None before three are known."""
        if len(self._durations) < 3:
            return None
        return statistics.median(self._durations)


class PrintedLengths:
    """Lengths of completions, of the steps that were printed so far. Of a long run every second one
    is dropped, again and again, so that they stay spread over it.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._every = 1
        self._seen = 0
        self._begun = ""  # a line whose end is not printed yet

    def feed(self, text: str) -> None:
        *lines, self._begun = (self._begun + text).split("\n")
        self._begun = self._begun[-MAX_LINE:]
        for step in printed_lengths("\n".join(lines)):
            self._seen += 1
            if self._seen % self._every == 0:
                self.steps.append(step)
        if len(self.steps) > MAX_LENGTHS:
            self.steps = self.steps[1::2]
            self._every *= 2


def _steps_in(text: str) -> list[PrintedStep]:
    """Return the steps in a text, the newest first."""
    steps = []
    for match in BAR.finditer(text):
        step = PrintedStep(
            place=match.start(),
            step=int(match["step"]),
            total=int(match["total"]),
        )
        steps.append(step)
    for match in STEP_OF_TOTAL.finditer(text):
        number = match["verl"] or match["step"]
        total = match["total"]
        step = PrintedStep(
            place=match.start(),
            step=int(number),
            total=int(total) if total else None,
        )
        steps.append(step)
    steps.sort(key=lambda step: -step.place)
    return steps

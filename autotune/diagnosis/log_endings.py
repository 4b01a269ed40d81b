"""How a log ends without a failure message: finished, no number any more, or given up after several
tries. The collector receives every line, and its size does not grow with the log.
"""

from __future__ import annotations

import re
from collections import deque

from autotune.failures.log_lines import read_line
from autotune.failures.table import LINES, expand

# Consecutive steps without a finite loss or gradient after which training does not recover.
STEPS_OF_NO_NUMBERS = 3

# Caught out-of-memory errors in the last lines from which on they are the reason for the end.
TIMES_CAUGHT = 3
_LAST_LINES = 12

_STEP = re.compile(expand(LINES.step))
_FINISHED = re.compile(expand(LINES.finished), re.IGNORECASE)
_ENDED = re.compile(expand(LINES.ended), re.IGNORECASE)
_SPAWNED = re.compile(r"process (\d{1,10}) spawned with command")
_EXITED = re.compile(r"Process (\d{1,10}) exits successfully")
MOST_PROCESSES = 4096  # that a collector of a log remembers
_ENDED_BADLY = re.compile(r"\bexit code:? [1-9]")
_CAUGHT = re.compile(r"\b(?:CUDA|HIP) out of memory\.?(?: Tried to allocate .{0,2000})?\s*\Z")
_NO_NUMBER = re.compile(expand(LINES.no_number), re.IGNORECASE)
_UPDATE_LEFT_OUT = re.compile(expand(LINES.update_left_out), re.IGNORECASE)


class LogEndings:
    """Collector of endings. It receives the lines that contain one of WORDS.of_endings."""

    def __init__(self) -> None:
        self.finished = ""
        """Line that reports the end of training, whatever was printed before it."""

        self.finished_last = False
        """True where the last line that counted was such a one, not a step."""

        self._ended = ""
        self._no_numbers: list[str] = []
        self._update_left_out = False
        self._caught: deque[tuple[int, str]] = deque(maxlen=TIMES_CAUGHT)
        self._spawned: set[str] = set()
        self._launched = False

    @property
    def without_failure(self) -> str:
        """Return the line that reports a normal end, empty where something failed."""
        return self.finished or self._ended

    @property
    def without_numbers(self) -> str:
        """Return the first of the final steps without a finite number."""
        needed = STEPS_OF_NO_NUMBERS - self._update_left_out
        if len(self._no_numbers) < needed:
            return ""
        return self._no_numbers[0]

    def caught_before(self, position: int) -> str:
        """Return the last caught out-of-memory message if several are directly before this line."""
        if len(self._caught) < TIMES_CAUGHT:
            return ""
        first_position, _ = self._caught[0]
        _, last_message = self._caught[-1]
        if first_position < position - _LAST_LINES:
            return ""
        return last_message

    def feed(self, raw: str, position: int) -> bool:
        """Return True for the line of a step, or one that reports the end of training."""
        if _STEP.search(raw) is not None:
            if _NO_NUMBER.search(raw) is None:
                self._no_numbers = []
                self._update_left_out = False
            elif len(self._no_numbers) < STEPS_OF_NO_NUMBERS:
                self._no_numbers.append(raw)
            self._ended = ""
            self.finished_last = False
            self._caught.clear()
            return True
        text = read_line(raw).text
        is_left_out = _UPDATE_LEFT_OUT.search(text) is not None
        self._update_left_out |= is_left_out
        if _FINISHED.match(text) is not None:
            self.finished = raw
            self.finished_last = True
            return True
        has_ended = _ENDED.match(text) is not None
        if has_ended or self._all_exited(text):
            self._ended = raw
        elif _ENDED_BADLY.search(text) is not None:
            self._ended = ""
        elif _CAUGHT.search(text) is not None:
            self._caught.append((position, raw))
        return False

    def _all_exited(self, text: str) -> bool:
        """Return True once all processes that a launcher started have exited successfully."""
        spawned = _SPAWNED.search(text)
        has_room = len(self._spawned) < MOST_PROCESSES
        if spawned is not None and has_room:
            self._launched = True
            self._spawned.add(spawned[1])
        exited = _EXITED.search(text)
        if exited is None:
            return False
        if not self._launched:
            # A log that begins later than its launcher: a process without another message has
            # exited normally.
            return True
        self._spawned.discard(exited[1])
        return not self._spawned

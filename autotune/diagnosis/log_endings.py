"""Endings of logs without a failure message: finished, no number any more, or given up after several tries."""

from __future__ import annotations

import re
from collections import deque

from autotune.failures.log_lines import read_line

STEPS_OF_NO_NUMBERS = 3
"""Number of consecutive steps without a finite loss or gradient after which training does not recover."""

TIMES_CAUGHT = 3
"""Number of caught out-of-memory errors in the last lines after which they are the reason for the end."""

_LAST_LINES = 12

PROGRESS = (
    "loss", "step:", "train_runtime", "train metrics", "training", "validation metrics", "trainer.fit", "time of running",
    "spawned with", "exits successfully", "succeeded", "out of memory", "exit code", "trainoutput(", "completed", "episode [",
    "epoch", "code 0", "status 0", "all processes", "iteration", "grad_norm", "grad norm",
)  # fmt: skip
"""Words of which every line that counts here contains one. Most lines are skipped by this test."""

_STEP = re.compile(
    r"""['"](?:train/|actor/|critic/)?(?:loss|pg_loss|policy_loss|reward)['"]\s*:|\bstep:\d+ - |\biteration +\d+/ *\d+ *\|"""
)
_FINISHED = re.compile(
    r"""\s*\{.{0,2000}['"]train_runtime['"]|\W*train metrics \*+|\W*(?:finished|completed) training\b"""
    r"""|(?:\W*|\[.{0,160}\] ?)training (?:is |has )?(?:been )?(?:completed?|finished|done)\b(?! with err)"""
    r"""|\W*TrainOutput\(global_step=|\W*Total training time: ?\d""",
    re.IGNORECASE,
)
_ENDED = re.compile(
    # Whole bars of epochs and episodes, as OpenRLHF and loops of one's own draw them
    r"\W*(?:(?:Train(?:ing)? )?(?:Epochs?|Episodes?)(?: ?\[?\d+ ?/ ?\d+\]?)?"
    r"|Training(?: steps?)?): {1,4}100%\|.{0,120}\b(\d+)/\1 "
    r"|(?:\W*|.{0,80}\b)(?:exited|finished|ended|completed|returned) with (?:exit )?(?:code|status):? 0\b"
    r"|\W*(?:exit|return) (?:code|status):? 0\b"
    r"|\W*(?:State|Status): COMPLETED\b|\W*All processes (?:exited|finished) successfully"
    # verl, its bar of all steps, which a failure may draw once more; ms-swift; Lightning; Ray's jobs
    r"|\W*Final validation metrics\W|Training Progress: 100%\||End time of running main: "
    r"|`?Trainer\.fit`? stopped: `max_\w+=\d+` reached|.{0,60}\bJob '[\w-]+' succeeded\b",
    re.IGNORECASE,
)
_SPAWNED = re.compile(r"process (\d{1,10}) spawned with command")
_EXITED = re.compile(r"Process (\d{1,10}) exits successfully")
_MOST_PROCESSES = 4096
_ENDED_BADLY = re.compile(r"\bexit code:? [1-9]")
_CAUGHT = re.compile(r"\b(?:CUDA|HIP) out of memory\.?(?: Tried to allocate .{0,2000})?\s*\Z")
_NO_NUMBER = re.compile(
    r"""(?:['"](?:[\w/]{0,40}/)?(?:pg_|policy_|actor_)?(?:loss|grad_norm)['"]: ?(?:tensor\()?['"]?|actor/(?:pg_loss|grad_norm):"""
    r"""|\b(?:lm )?loss(?: \d)?: |\bgrad norm: )nan\b""",
    re.IGNORECASE,
)
_UPDATE_LEFT_OUT = re.compile(r"\bgrad\w*[ _]norm is not finite|\bBad grad_norm detected|\bNan grad norm occurs", re.IGNORECASE)
"""Messages of trainers that skipped an update because a gradient was not finite."""


class LogEndings:
    """Collector of endings. It receives the lines that contain a word of PROGRESS."""

    def __init__(self) -> None:
        self.finished = ""  # line that reports the end of training, whatever was printed before it

        self.finished_last = False  # true where the last line that counted was such a one, not a step

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
        return self._no_numbers[0] if len(self._no_numbers) >= needed else ""

    def caught_before(self, position: int) -> str:
        """Return the last caught out-of-memory message if several are directly before this line."""
        often = len(self._caught) == TIMES_CAUGHT and self._caught[0][0] >= position - _LAST_LINES
        return self._caught[-1][1] if often else ""

    def feed(self, raw: str, position: int) -> bool:
        """Return True for the line of a step, or one that reports the end of training."""
        if _STEP.search(raw) is not None:
            if _NO_NUMBER.search(raw) is None:
                self._no_numbers, self._update_left_out = [], False
            elif len(self._no_numbers) < STEPS_OF_NO_NUMBERS:
                self._no_numbers.append(raw)
            self._ended, self.finished_last = "", False
            self._caught.clear()
            return True
        text = read_line(raw).text
        self._update_left_out |= _UPDATE_LEFT_OUT.search(text) is not None
        if _FINISHED.match(text) is not None:
            self.finished, self.finished_last = raw, True
            return True
        if _ENDED.match(text) is not None or self._all_exited(text):
            self._ended = raw
        elif _ENDED_BADLY.search(text) is not None:
            self._ended = ""
        elif _CAUGHT.search(text) is not None:
            self._caught.append((position, raw))
        return False

    def _all_exited(self, text: str) -> bool:
        """Return True once all processes that a launcher started have exited successfully."""
        if (spawned := _SPAWNED.search(text)) is not None and len(self._spawned) < _MOST_PROCESSES:
            self._launched = True
            self._spawned.add(spawned[1])
        exited = _EXITED.search(text)
        if exited is None:
            return False
        if not self._launched:
            # A log that begins later than its launcher: a process without another message has exited normally.
            return True
        self._spawned.discard(exited[1])
        return not self._spawned

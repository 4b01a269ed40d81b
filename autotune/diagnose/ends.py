"""How a log ends that holds no failure of its own words: it finished, its numbers are none, or it gave up after several tries."""

from __future__ import annotations

import re
from collections import deque

from autotune.failures import read_line

STEPS_OF_NO_NUMBERS = 3
"""So many steps in a row whose loss or gradient is no number: it does not come back from that."""

TIMES_CAUGHT = 3
"""So many times memory ran out, and was caught, in the last lines: what ended behind that ended by it."""

_LAST_LINES = 12

PROGRESS = (
    "loss", "step:", "train_runtime", "train metrics", "training", "validation metrics", "trainer.fit", "time of running",
    "spawned with", "exits successfully", "succeeded", "out of memory", "exit code", "trainoutput(", "completed", "episode [",
    "epoch", "code 0", "status 0", "all processes", "iteration", "grad_norm", "grad norm",
)  # fmt: skip
"""One of these is in every line that counts here: most are settled by this alone."""

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
"""A trainer that says itself that it met no number where it was to update the weights, besides what it logs of the step."""


class Ends:
    """Fed with the lines that have a word of PROGRESS."""

    def __init__(self) -> None:
        self.finished = ""
        """The line that says so, whatever was printed before it."""

        self.finished_last = False
        """Whether the last line that counted was such a one, and no step's."""

        self._ended = ""
        self._no_numbers: list[str] = []
        self._update_left_out = False
        self._caught: deque[tuple[int, str]] = deque(maxlen=TIMES_CAUGHT)
        self._spawned: set[str] = set()
        self._launched = False

    @property
    def without_failure(self) -> str:
        """The line that tells of a good end, where nothing failed."""
        return self.finished or self._ended

    @property
    def without_numbers(self) -> str:
        """The first of several steps without a number, which are the last."""
        needed = STEPS_OF_NO_NUMBERS - self._update_left_out
        return self._no_numbers[0] if len(self._no_numbers) >= needed else ""

    def caught_before(self, position: int) -> str:
        """The last line of several, right before this one, in which a program says that memory ran out and that it goes on."""
        often = len(self._caught) == TIMES_CAUGHT and self._caught[0][0] >= position - _LAST_LINES
        return self._caught[-1][1] if often else ""

    def feed(self, raw: str, position: int) -> bool:
        """Whether it is a step's line, or one that says that the training finished."""
        if _STEP.search(raw) is not None:
            self._watch_numbers(raw)
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
        """A launcher's processes, which it names when it starts them and when they end."""
        if (spawned := _SPAWNED.search(text)) is not None and len(self._spawned) < _MOST_PROCESSES:
            self._launched = True
            self._spawned.add(spawned[1])
        exited = _EXITED.search(text)
        if exited is None:
            return False
        if not self._launched:
            # A log that begins later than its launcher: of whom nothing else is said has ended well.
            return True
        self._spawned.discard(exited[1])
        return not self._spawned

    def _watch_numbers(self, raw: str) -> None:
        if _NO_NUMBER.search(raw) is None:
            self._no_numbers, self._update_left_out = [], False
        elif len(self._no_numbers) < STEPS_OF_NO_NUMBERS:
            self._no_numbers.append(raw)

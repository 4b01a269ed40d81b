"""Lines of a short excerpt, told apart by how loud their program printed them.

Most words of a failure are also in remarks of a run that goes on. Who printed a line tells them
apart: a logger writes its level in front, and Python's `warnings` the class of the warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autotune.failures.log_lines import Level, LogLine, read_line
from autotune.failures.table import LINES, expand

MOST_CHARACTERS = 2000  # of a line that are read; a message is shorter
MOST_LINES_OF_A_WARNING = 8  # of its message, in front of the statement that printed it

_HARMLESS = re.compile(expand(LINES.harmless))
_PYTHON_WARNING = re.compile(expand(LINES.python_warning))
_GRAVE_WARNING = re.compile(expand(LINES.grave_warning))

# Colours whose escape character a browser or a pager showed otherwise, or left out.
_SHOWN_COLOUR = re.compile(r"(?:\^\[|\ufffd)?\[\d{1,3}(?:;\d{1,3}){0,4}m")

_ESCAPED_QUOTE = re.compile(r"\\+(['\"])")

# Marks of a quotation, and labels in front of an issue's title.
_QUOTE = re.compile(
    r"\A(?:> ?|\* |\[(?:bugs?|usage|questions?|help|installation|issue|performance|misc|core|doc)\]"
    r"[: ]*)+",
    re.IGNORECASE,
)

# Quotation marks and colons as word processors and other scripts write them.
_PLAIN_MARKS = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "：": ": "})  # noqa: RUF001

_SPACE_BEFORE_COLON = re.compile(r"(?<=Error) :(?= )")

# Frame whose line was cut at its start.
_CUT_FRAME = re.compile(r'\A(?!.*\bFile ")(?=\S+\.py", line \d+, in )')

_STEP_WITHOUT_NUMBER = re.compile(
    r"""\b(?:loss|grad[_ ]norm)['"]?\s*[:=]\s*['"]?nan\b""", re.IGNORECASE
)

_STEP_WITH_NUMBER = re.compile(r"""\bgrad[_ ]norm['"]?\s*[:=]\s*['"]?\d""", re.IGNORECASE)


_ENDING = re.compile(r"[,.;:] ?(?:exiting|aborting|terminating|giving up)\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ExcerptLines:
    """Lines that may be the message, without remarks that say themselves that the run goes on."""

    all: Sequence[LogLine]
    loud: Sequence[LogLine]  # errors, and lines without a level
    warnings: Sequence[LogLine]
    infos: Sequence[LogLine]


def excerpt_lines(excerpt: Iterable[str]) -> ExcerptLines:
    lines = _without_python_warnings(list(map(_read, excerpt)))
    by_level: dict[Level, list[LogLine]] = {"error": [], "warning": [], "info": []}
    remaining = []
    for line in _without_passing_steps(lines):
        if _HARMLESS.match(line.text) is None:
            remaining.append(line)
            by_level[line.level or "error"].append(line)
    return ExcerptLines(
        all=remaining,
        loud=by_level["error"],
        warnings=by_level["warning"],
        infos=by_level["info"],
    )


def is_step_without_number(line: str) -> bool:
    """Return True for a step of training whose loss or gradient is no number."""
    return _STEP_WITHOUT_NUMBER.search(line) is not None


def _read(raw: str) -> LogLine:
    text = _QUOTE.sub("", raw)[:MOST_CHARACTERS]
    text = _SHOWN_COLOUR.sub("", text)
    text = _ESCAPED_QUOTE.sub(r"\1", text)  # a message inside a printed string
    text = text.translate(_PLAIN_MARKS)
    text = _SPACE_BEFORE_COLON.sub(":", text, count=1)
    completed = _CUT_FRAME.sub('  File "/', text, count=1)
    return read_line(completed)


def _without_python_warnings(lines: Sequence[LogLine]) -> list[LogLine]:
    """Leave out what Python's `warnings` printed, unless it says that the device is of no use.

    A warning ends with the statement that printed it, which is indented.
    """
    remaining = []
    end = 0
    for position, line in enumerate(lines):
        if position < end:
            continue
        if _PYTHON_WARNING.search(line.text) is None:
            loud = _louder(line)
            remaining.append(loud)
        elif _GRAVE_WARNING.search(line.text) is not None:
            remaining.append(replace(line, level=None))
        else:
            end = _end_of_warning(lines, position)
    return remaining


def _louder(line: LogLine) -> LogLine:
    """Return a remark as an error where it says that the process ends, or cannot use its device."""
    is_grave = False
    if line.level == "warning":
        is_grave = _GRAVE_WARNING.search(line.text) is not None
    if line.is_remark and _ENDING.search(line.text):
        is_grave = True
    if not is_grave:
        return line
    return replace(line, level="error")


def _end_of_warning(lines: Sequence[LogLine], begin: int) -> int:
    """Return the position behind a warning that begins here."""
    last = min(len(lines), begin + 1 + MOST_LINES_OF_A_WARNING)
    for position in range(begin + 1, last):
        if lines[position].text.startswith("  "):
            return position + 1
    return begin + 1


def _without_passing_steps(lines: Sequence[LogLine]) -> list[LogLine]:
    """Leave out steps whose gradient is no number, where a later step has one: scaling of losses
    begins with such steps.
    """
    last_number = 0
    for position, line in enumerate(lines):
        if _STEP_WITH_NUMBER.search(line.text) is not None:
            last_number = position
    remaining = []
    for position, line in enumerate(lines):
        is_passing = position < last_number and is_step_without_number(line.text)
        if not is_passing:
            remaining.append(line)
    return remaining

"""Lines of a log without colours, progress bars and prefixes, which name the rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.core.plain_text import TERMINAL_SEQUENCE
from autotune.failures.table import LINES, expand

Level = Literal["error", "warning", "info"]


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """Line without its prefixes."""

    text: str
    source: str  # process by the prefixes; lines of one source belong together
    rank: int | None = None
    level: Level | None = None  # of its logger; None for printed text

    @property
    def is_remark(self) -> bool:
        """Return True if its logger marked the line as less than an error."""
        return self.level in ("warning", "info")


# Progress bar with the text of another process behind it in the same line.
_BAR = re.compile(
    r"[^|\n]{0,80}?\d{1,3}%\|[^|\n]{0,200}\| ?[\d.kMG]+/[\d.kMG]+ \[[^\]\n]{0,80}\](?=\S)"
)
_PART_OF_BAR = "%|"
"""The search for a bar begins at each character, and takes a third of a diagnosis without one."""

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

_PREFIXES = tuple(re.compile(expand(pattern)) for pattern in LINES.prefixes)

_RANK_OF_ACTOR = re.compile(r"\brank=(\d{1,6})\b|\AWorker\w*_TP(\d{1,6}) ")

_MOST_PREFIXES = 6

# Groups of the prefixes that name the process, its rank, and the level of its logger.
_SOURCES = ("actor", "rank", "task", "process", "container", "service")

_RANKS = ("rank", "task", "process")

_LEVELS = ("level", "logged", "named", "letter", "ray")

_LEVEL_OF_LETTER: Mapping[str, Level] = {
    "E": "error",
    "F": "error",
    "C": "error",
    "W": "warning",
}


def read_line(raw: str) -> LogLine:
    """Return a line without its prefixes; the indentation behind them stays."""
    without_colours = TERMINAL_SEQUENCE.sub("", raw)
    text = _UNPRINTABLE.sub("", without_colours)
    if _PART_OF_BAR in text:
        text = _BAR.sub("", text, count=1)
    source = ""
    rank: int | None = None
    level: Level | None = None
    for _ in range(_MOST_PREFIXES):
        prefix = _prefix(text)
        if prefix is None:
            break
        text = text[prefix.end() :]
        groups = {}
        for name, value in prefix.groupdict().items():
            if value is not None:
                groups[name] = value
        source += _first_of(groups, _SOURCES) or ""
        if rank is None:
            rank = _rank(groups)
        level_name = _first_of(groups, _LEVELS)
        if level_name is not None:
            level = _LEVEL_OF_LETTER.get(level_name[0], "info")
    return LogLine(
        text=text,
        source=source,
        rank=rank,
        level=level,
    )


def _prefix(text: str) -> re.Match[str] | None:
    for pattern in _PREFIXES:
        match = pattern.match(text)
        if match is not None and match.end():
            return match
    return None


def _first_of(groups: Mapping[str, str], names: Sequence[str]) -> str | None:
    for name in names:
        if name in groups:
            return groups[name]
    return None


def _rank(groups: Mapping[str, str]) -> int | None:
    for name in _RANKS:
        if groups.get(name):
            return int(groups[name])
    actor = _RANK_OF_ACTOR.search(groups.get("actor", ""))
    if actor is None:
        return None
    return int(actor[1] or actor[2])

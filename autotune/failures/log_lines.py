"""Lines of a log without colours, progress bars and prefixes, with the rank that printed them.

Logs are large, so they are read once, in blocks. The middle of a line without an end is cut out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

LONGEST_LINE = 2**15
"""Bytes that are kept of a longer line, half of them from its end: launchers print the exit code last."""

BLOCK = 2**20

Level = Literal["error", "lower"]


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """Line without its prefixes."""

    text: str
    source: str  # process that printed it, according to its prefixes; lines of one source belong together
    rank: int | None = None
    level: Level | None = None  # of its logger: an error or something lower; None for printed text


def lines_of(stream: BinaryIO, head: bytes = b"") -> Iterator[str]:
    r"""Yield text lines of bounded length, ended by \n, \r or both. Undecodable bytes are replaced. `head` was read before."""
    half, pending = LONGEST_LINE // 2, b""
    for block in itertools.chain([head], iter(lambda: stream.read(BLOCK), b"")):
        # A progress bar is redrawn by \r: each drawing is a line, and what is printed over it is one of its own.
        lines = (pending + block).replace(b"\r", b"\n").split(b"\n")
        *whole, pending = (line if len(line) <= LONGEST_LINE else line[:half] + line[-half:] for line in lines)
        yield from (line.decode("utf-8", errors="replace") for line in whole)
    yield pending.decode("utf-8", errors="replace")


_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_BAR = re.compile(r"[^|\n]{0,80}?\d{1,3}%\|[^|\n]{0,200}\| ?[\d.kMG]+/[\d.kMG]+ \[[^\]\n]{0,80}\](?=\S)")
"""Progress bar with the text of another process behind it in the same line."""

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_LEVELS = r"ERROR|CRITICAL|FATAL|WARNING|WARN|INFO|DEBUG"
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        # torchrun and torch itself; `[default1]:` is torchrun's --tee.
        r"(?:[\w.-]{1,80}: )?\[(?:rank|default)(?P<rank>\d{1,6})\]:? ?",
        # Ray's actors, vLLM's processes, verl's workers.
        r"\((?P<actor>raylet[^()]{0,80}|[A-Za-z_][\w.:]{0,80}[ ,][^()]{0,120}\bpid=\d+[^()]{0,80})\) ?",
        # srun --label
        r" {0,3}(?P<task>\d{1,5}): (?=\S| +File | {4})",
        # mpirun --tag-output; containers of Compose and of kubectl; the journal of a machine
        r"\[\d{1,6},(?P<process>\d{1,6})\]<std(?:err|out)>: ?",
        r"(?P<container>[A-Za-z][\w.-]{0,60}-\d{1,4} {1,40}\|(?= |$)|\[pod/[^\]\s]{1,200}\]) ?",
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,60} (?P<service>[\w./-]{1,60}\[\d{1,10}\]): ?",
        # glog: `E1120 18:14:00.860000 23297 torch/.../api.py:1002] `, `[E219 12:14:43.35 ProcessGroupNCCL.cpp:1595] `
        r"\[?(?P<letter>[EWIF])\d{0,4}(?: [^\]]{0,160})?\.(?:cpp|cc|cu|py|h|hpp):\d+\] ?",
        # vLLM: `ERROR 04-05 01:12:55 [core.py:390] `
        rf"(?P<level>{_LEVELS}) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]{{1,80}}\] ?)?",
        # Ray's own: `[2025-04-02 15:02:00,117 E 135782 135782] `
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+ (?P<ray>[EWIDCF]) [\d ]+\] ?",
        # logging, DeepSpeed, transformers, Kubernetes
        (
            rf"\[?\d{{4}}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[,.]\d+)?Z?\]? ?(?:[-|:] ?)?"
            rf"(?:\[?(?P<logged>{_LEVELS})\b[|\]:]? ?(?:[-|:] ?)?(?:\[[^\]\s]{{1,120}}\] ?)?)?"
        ),
        rf"\[?(?P<named>{_LEVELS})(?:\|[^\]\s]{{1,160}}\]|:[\w.]{{1,80}}\]|\]|:)(?: \d\d-\d\d-\d\d \d\d:\d\d:\d\d,?| >>)? ?",
    )
)
_RANK_OF_ACTOR = re.compile(r"\brank=(\d{1,6})\b|\AWorker\w*_TP(\d{1,6}) ")
_MOST_PREFIXES = 6
_SOURCES = ("actor", "rank", "task", "process", "container", "service")


def read_line(raw: str) -> LogLine:
    """Return a line without its prefixes; the indentation behind them stays."""
    text, source = _BAR.sub("", _UNPRINTABLE.sub("", _COLOUR.sub("", raw)), count=1), ""
    rank: int | None = None
    level: Level | None = None
    for _ in range(_MOST_PREFIXES):
        match = next((match for pattern in _PREFIXES if (match := pattern.match(text)) and match.end()), None)
        if match is None:
            break
        reported = {name: value for name, value in match.groupdict().items() if value is not None}
        text = text[match.end() :]
        word = next((reported[name] for name in ("level", "logged", "named", "letter", "ray") if name in reported), None)
        if word is not None:
            level = "error" if word[0] in "EFC" else "lower"
        named = reported.get("rank") or reported.get("task") or reported.get("process")
        if named is None and (actor := _RANK_OF_ACTOR.search(reported.get("actor", ""))) is not None:
            named = actor[1] or actor[2]
        rank = int(named) if named is not None and rank is None else rank
        source += next((reported[name] for name in _SOURCES if name in reported), "")
    return LogLine(text=text, source=source, rank=rank, level=level)

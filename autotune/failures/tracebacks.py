"""Python exceptions of a log, assembled from the interleaved lines of several processes.

A line is first freed of colours, progress bars and prefixes, which name the rank that printed it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from autotune.failures.table import LINES, expand

Level = Literal["error", "lower"]


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """Line without its prefixes."""

    text: str
    # process that printed it, according to its prefixes; lines of one source belong together
    source: str
    rank: int | None = None
    level: Level | None = None  # of its logger: an error or something lower; None for printed text


_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_BAR = re.compile(
    r"[^|\n]{0,80}?\d{1,3}%\|[^|\n]{0,200}\| ?[\d.kMG]+/[\d.kMG]+ \[[^\]\n]{0,80}\](?=\S)"
)
"""Progress bar with the text of another process behind it in the same line."""

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_PREFIXES = tuple(re.compile(expand(pattern)) for pattern in LINES.prefixes)
_RANK_OF_ACTOR = re.compile(r"\brank=(\d{1,6})\b|\AWorker\w*_TP(\d{1,6}) ")
_MOST_PREFIXES = 6
_SOURCES = ("actor", "rank", "task", "process", "container", "service")


def read_line(raw: str) -> LogLine:
    """Return a line without its prefixes; the indentation behind them stays."""
    text, source = _BAR.sub("", _UNPRINTABLE.sub("", _COLOUR.sub("", raw)), count=1), ""
    rank: int | None = None
    level: Level | None = None
    for _ in range(_MOST_PREFIXES):
        match = next(
            (match for pattern in _PREFIXES if (match := pattern.match(text)) and match.end()), None
        )
        if match is None:
            break
        reported = {name: value for name, value in match.groupdict().items() if value is not None}
        text = text[match.end() :]
        word = next(
            (
                reported[name]
                for name in ("level", "logged", "named", "letter", "ray")
                if name in reported
            ),
            None,
        )
        if word is not None:
            level = "error" if word[0] in "EFC" else "lower"
        named = reported.get("rank") or reported.get("task") or reported.get("process")
        if (
            named is None
            and (actor := _RANK_OF_ACTOR.search(reported.get("actor", ""))) is not None
        ):
            named = actor[1] or actor[2]
        rank = int(named) if named is not None and rank is None else rank
        source += next((reported[name] for name in _SOURCES if name in reported), "")
    return LogLine(text=text, source=source, rank=rank, level=level)


HEADER = "Traceback (most recent call last)"
MOST_FRAMES = 80  # innermost frames that are kept
MOST_SOURCES = 4096  # processes that are distinguished
_MOST_TEXT = 4096
_MOST_NOISE = 40  # foreign lines inside a traceback after which it is dropped

_FRAME = re.compile(r'[\s>]*File "([^"]{1,1000})", line \d+, in (\S{1,200})')
_FRAME_IN_NOTEBOOK = re.compile(r"(?:File )?(/\S{1,1000}?\.py)(?::\d+, in | in )([\w.<>]{1,200})")
_FRAME_IN_BOX = re.compile(r"[│|] (\S{1,1000}?):\d+ in (\S{1,200})")
_FRAMES = (_FRAME, _FRAME_IN_NOTEBOOK, _FRAME_IN_BOX)
_BOX = ("│", "╭", "╰")
_MOST_WRAPPED = 20  # lines over which the exception of a box is wrapped at most
_THROWN = re.compile(
    r"(?:(?:[A-Za-z_]\w{0,80}\.){1,12}[A-Za-z_]|[A-Z])\w{0,120}(?:\(\w{1,120}\))?(?=:(?:\s|$)|$)"
)
_ALONE = re.compile(
    r"(?:[A-Za-z_]\w{0,80}\.){0,12}\w{0,120}(?:Error|Exception|LimitForeseen)(?:\(\w{1,120}\))?(?=:(?:\s|$)|$)"
)
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_ORIGINAL = "Original Traceback"
_REMOTE = re.compile(r"RayTaskError\(|an error raised in its creation task, ray::")
"""Ray's header for an exception of another actor, whose frames and text come next."""

_MOST_MORE = 8
_MOST_MORE_TEXT = 500
_NO_MORE = re.compile(
    r"\s*(?:[\[{<=#*-]|\d+%|\d{4}-|Killed\b|Sending |Set the"
    r" environment|Segmentation|wandb\b|srun\b|slurmstepd\b"
    r"|E?rror executing)"
    r"|(?:[\w./-]+: )?(?:line \d+: |error: )|\S+:\d+: "
)
"""Start of something else: a logger's line, a launcher's, or a metric."""

_HARMLESS = (
    "Exception ignored in",
    "--- Logging error ---",
)  # Headers of exceptions after which Python continues


@dataclass(frozen=True, kw_only=True)
class LoggedException:
    """Exception: its text and its frames."""

    text: str
    frames: tuple[str, ...] = ()  # as `file:function source line`, innermost last
    # lines directly behind it, which may belong to its text: a message's further lines are not
    # indented
    more: str = ""


@dataclass(frozen=True, kw_only=True)
class ExceptionChain:
    """Chain of exceptions that one process printed."""

    position: int  # number of its first line
    rank: int | None
    chain: tuple[LoggedException, ...]  # in the order of printing, the earliest first
    has_traceback: bool
    is_whole: bool  # a traceback with its header


@dataclass(kw_only=True)
class _Open:
    """Traceback that is not complete yet."""

    position: int
    rank: int | None
    mark: str = (
        ""  # text before the header, such as a container's name; removed from the next lines too
    )
    chain: list[LoggedException] = field(default_factory=list)
    frames: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_FRAMES))
    text: str = ""
    has_header: bool = True
    remote: str = ""  # Ray's header of a remote exception, whose traceback comes next
    harmless: bool = False
    boxed: bool = False  # drawn as a box, behind which the exception's text is wrapped
    in_frames: bool = True
    noise: int = 0
    wrapped: int = 0
    more: list[str] = field(default_factory=list)
    in_more: bool = False  # the last line was added to `more`
    complete: bool = False

    def close_exception(self) -> None:
        if self.text or self.remote:
            more = "\n".join(self.more)
            self.chain.append(
                LoggedException(text=self.text or self.remote, frames=tuple(self.frames), more=more)
            )
        self.text = self.remote = ""
        self.frames.clear()
        self.more.clear()
        self.in_more = self.complete = False

    def goes_on_with(self, line: LogLine, text: str) -> bool:
        """Return True if a line without indentation may belong to the exception's text."""
        if not self.text or self.complete or line.level is not None or len(self.more) >= _MOST_MORE:
            return False
        return _NO_MORE.match(text) is None and _ALONE.match(text) is None


def exceptions_in(printed: str) -> list[LoggedException]:
    """Return the exceptions of all tracebacks in a text."""
    tracebacks = Tracebacks()
    reported = [
        one
        for position, line in enumerate(printed.splitlines())
        for one in tracebacks.feed(read_line(line), position)
    ]
    return [
        thrown
        for one in (*reported, *tracebacks.flush())
        if one.has_traceback
        for thrown in one.chain
    ]


class Tracebacks:
    """Assembler of tracebacks. It receives lines in order and yields each exception when it is
    complete.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._harmless: set[str] = set()

    @property
    def busy(self) -> bool:
        """Return True while a traceback is open, so that every line must be read."""
        return bool(self._open or self._harmless)

    def feed(self, line: LogLine, position: int) -> Iterator[ExceptionChain]:
        if any(line.text.startswith(words) for words in _HARMLESS):
            self._harmless.add(line.source)
            return
        open_ = self._open.get(line.source)
        if HEADER in line.text:
            yield from self._begin(line, position, open_)
        elif open_ is not None:
            yield from self._go_on(open_, line, position)
        else:
            yield from self._alone(line, position)

    def holds(self, line: LogLine) -> bool:
        """Return True if the line belongs to an open traceback and to nothing else."""
        return line.source in self._open and not self._open[line.source].in_more

    def flush(self) -> Iterator[ExceptionChain]:
        """Yield the tracebacks that were open at the end of the log."""
        for source in list(self._open):
            yield from self._end(source)

    def frames_cut_off(self) -> tuple[str, ...]:
        """Return the frames of a traceback that has no exception yet."""
        return next(
            (
                tuple(open_.frames)
                for open_ in self._open.values()
                if open_.frames and not open_.text
            ),
            (),
        )

    def _begin(self, line: LogLine, position: int, open_: _Open | None) -> Iterator[ExceptionChain]:
        if open_ is not None and open_.text and line.text.startswith(_ORIGINAL):
            # A loader's worker: what it failed with follows the words that it did.
            open_.close_exception()
            open_.chain.clear()
            open_.in_frames, open_.noise = True, 0
            return
        awaited = open_ is not None and not open_.text and bool(open_.chain) and not open_.in_frames
        if open_ is not None and (awaited or open_.remote):
            open_.in_frames, open_.noise = True, 0
            return
        yield from self._end(line.source)
        if len(self._open) < MOST_SOURCES:
            harmless = line.source in self._harmless or line.level == "lower"
            self._open[line.source] = _Open(
                position=position,
                rank=line.rank,
                harmless=harmless,
                mark=line.text.partition(HEADER)[0],
                boxed=line.text.lstrip().startswith("╭"),
            )
        self._harmless.discard(line.source)

    def _go_on(self, open_: _Open, line: LogLine, position: int) -> Iterator[ExceptionChain]:
        text = line.text.removeprefix(open_.mark).rstrip()
        open_.in_more = False
        if open_.in_frames:
            yield from self._in_frames(open_, line, text)
        elif not text.strip(" |+-"):
            # Behind a box an empty line ends what was wrapped.
            open_.boxed = open_.boxed and not open_.text
            open_.complete = open_.complete or bool(open_.more)
        elif text.startswith(_CHAINED):
            open_.close_exception()
        elif (
            open_.text
            and open_.boxed
            and open_.wrapped < _MOST_WRAPPED
            and not text.startswith(_BOX)
        ):
            open_.wrapped += 1
            open_.text = f"{open_.text} {text.strip()}"[:_MOST_TEXT]
        elif open_.text and text[0] in " \t":
            open_.text = f"{open_.text}\n{text}"[:_MOST_TEXT]
        elif open_.goes_on_with(line, text):
            open_.more.append(text[:_MOST_MORE_TEXT])
            open_.in_more = True
        elif open_.text or open_.noise >= _MOST_NOISE:
            yield from self._end(line.source)
            yield from self.feed(line, position)
        else:
            open_.noise += 1

    def _in_frames(self, open_: _Open, line: LogLine, text: str) -> Iterator[ExceptionChain]:
        frame = next(
            (frame for pattern in _FRAMES if (frame := pattern.match(text)) is not None), None
        )
        if frame is not None:
            # Places are known by their names with slashes, which Windows writes the other way.
            file = frame[1].replace("\\", "/")
            open_.frames.append(f"{file}:{frame[2].rpartition('.')[2]}")
        elif text[:1] in (" ", "\t", "", *_BOX) or text.startswith("--"):
            if open_.frames and text.strip(" ~^\t│-") and len(open_.frames[-1]) < 1000:
                open_.frames[-1] += f" {text.strip(' │')[:300]}"
        elif _REMOTE.search(text) is not None:
            # An exception that crossed several actors: the innermost one's places follow the last
            # of these words.
            open_.remote = text[:_MOST_TEXT]
        elif _THROWN.match(text):
            open_.text, open_.in_frames = text[:_MOST_TEXT], False
        else:
            open_.noise += 1
            if open_.noise > _MOST_NOISE:
                yield from self._end(line.source)

    def _alone(self, line: LogLine, position: int) -> Iterator[ExceptionChain]:
        """Yield an exception whose traceback is missing: logs are cut, and some loggers print
        the last line alone.
        """
        text = line.text.strip()
        if _FRAME.match(line.text) is not None and len(self._open) < MOST_SOURCES:
            # A log that was cut in the middle of a traceback.
            self._open[line.source] = _Open(
                position=position, rank=line.rank, harmless=line.level == "lower", has_header=False
            )
            yield from self._go_on(self._open[line.source], line, position)
        elif line.level == "lower" or _ALONE.match(text) is None:
            return
        elif _REMOTE.search(text) is not None and len(self._open) < MOST_SOURCES:
            self._open[line.source] = _Open(
                position=position, rank=line.rank, remote=text[:_MOST_TEXT]
            )
        else:
            yield ExceptionChain(
                position=position,
                rank=line.rank,
                chain=(LoggedException(text=text[:_MOST_TEXT]),),
                has_traceback=False,
                is_whole=False,
            )

    def _end(self, source: str) -> Iterator[ExceptionChain]:
        open_ = self._open.pop(source, None)
        if open_ is None:
            return
        open_.close_exception()
        if open_.chain and not open_.harmless:
            yield ExceptionChain(
                position=open_.position,
                rank=open_.rank,
                chain=tuple(open_.chain[:32]),
                has_traceback=True,
                is_whole=open_.has_header,
            )

"""Python exceptions of a log, assembled from the interleaved lines of several processes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from autotune.failures.log_lines import LogLine, read_line

HEADER = "Traceback (most recent call last)"
MOST_FRAMES = 80  # innermost frames that are kept
MOST_SOURCES = 4096  # processes that are distinguished
_MOST_TEXT = 4096
_MOST_SOURCE = 1000
_MOST_NOISE = 40  # foreign lines inside a traceback after which it is dropped
_MARKS = re.compile(r"\s*[~^]*\^[~^]*\Z")  # under the part of a source line that was running

_FRAME = re.compile(r'[\s>]*File "([^"]{1,1000})", line \d+, in (\S{1,200})')
_FRAME_IN_NOTEBOOK = re.compile(r"(?:File )?(/\S{1,1000}?\.py)(?::\d+, in | in )([\w.<>]{1,200})")
_FRAME_IN_BOX = re.compile(r"[│|] (\S{1,1000}?):\d+ in (\S{1,200})")
_FRAMES = (_FRAME, _FRAME_IN_NOTEBOOK, _FRAME_IN_BOX)
_BOX = ("│", "╭", "╰")
_INSIDE = (" ", "\t", "--", *_BOX)  # starts of a traceback's lines between two frames
_MOST_WRAPPED = 20  # lines over which the exception of a box is wrapped at most
_THROWN = re.compile(
    r"(?:(?:[A-Za-z_]\w{0,80}\.){1,12}[A-Za-z_]|[A-Z])\w{0,120}(?:\(\w{1,120}\))?(?=:(?:\s|$)|$)"
)
_WITHOUT_TRACEBACK = re.compile(
    r"(?:[A-Za-z_]\w{0,80}\.){0,12}\w{0,120}(?:Error|Exception|LimitForeseen)(?:\(\w{1,120}\))?"
    r"(?=:(?:\s|$)|$)"
)
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_ORIGINAL = "Original Traceback"

# Ray's header for an exception of another actor, whose frames and text come next.
_REMOTE = re.compile(r"RayTaskError\(|an error raised in its creation task, ray::")

_MOST_MORE = 8
_MOST_MORE_TEXT = 500

# Start of something else: a logger's line, a launcher's, or a metric.
_NO_MORE = re.compile(
    r"\s*(?:[\[{<=#*-]|\d+%|\d{4}-|Killed\b|Sending |Set the environment|Segmentation"
    r"|wandb\b|srun\b|slurmstepd\b|E?rror executing)"
    r"|(?:[\w./-]+: )?(?:line \d+: |error: )|\S+:\d+: "
)

# Headers of exceptions after which Python continues.
_HARMLESS = ("Exception ignored in", "--- Logging error ---")


@dataclass(frozen=True, kw_only=True)
class LoggedException:
    """Exception: its text and its frames."""

    text: str
    frames: tuple[str, ...] = ()  # as `file:function source line`, innermost last

    continuation: str = ""
    """Lines directly behind it, which may belong to its text: a message's further lines are not
    indented."""


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

    mark: str = ""
    """Text before the header, such as a container's name; removed from the next lines too."""

    chain: list[LoggedException] = field(default_factory=list)
    frames: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_FRAMES))
    source_line: str = ""  # of the innermost frame so far, as it is printed
    text: str = ""
    has_header: bool = True
    remote: str = ""  # Ray's header of a remote exception, whose traceback comes next
    harmless: bool = False
    boxed: bool = False  # drawn as a box, behind which the exception's text is wrapped
    in_frames: bool = True
    noise: int = 0
    wrapped: int = 0
    continuation: list[str] = field(default_factory=list)
    in_more: bool = False  # the last line was added to `more`
    complete: bool = False

    def close_exception(self) -> None:
        if self.text or self.remote:
            exception = LoggedException(
                text=self.text or self.remote,
                frames=tuple(self.frames),
                continuation="\n".join(self.continuation),
            )
            self.chain.append(exception)
        self.text = self.remote = ""
        self.frames.clear()
        self.continuation.clear()
        self.in_more = self.complete = False

    def add_source(self, text: str) -> None:
        """Add a source line to the innermost frame, but not the marks below it."""
        if not self.frames or not text.strip(" ~^\t│-"):
            return
        frame = self.frames.pop()
        if len(frame) < _MOST_SOURCE:
            self.source_line = text
            source = text.strip(" │")
            frame += f" {source[:300]}"
        self.frames.append(frame)

    def keep_marked_statement(self, marks: str) -> None:
        """Keep the statement above the marks, of the innermost frame's several ones."""
        indent = len(marks) - len(marks.lstrip())
        before = self.source_line[:indent]
        begin = before.rfind(";") + 1
        statement, _, _ = self.source_line[begin:].partition(";")
        frame = self.frames.pop()
        place, _, _ = frame.partition(" ")
        self.frames.append(f"{place} {statement.strip()}")

    def goes_on_with(self, line: LogLine, text: str) -> bool:
        """Return True if a line without indentation may belong to the exception's text."""
        if (
            not self.text
            or self.complete
            or line.level is not None
            or len(self.continuation) >= _MOST_MORE
        ):
            return False
        if _NO_MORE.match(text) is not None:
            return False
        return _WITHOUT_TRACEBACK.match(text) is None

    def wraps_into(self, text: str) -> bool:
        """Return True if a line behind a box belongs to the exception's wrapped text."""
        has_room = self.wrapped < _MOST_WRAPPED
        is_open = bool(self.text) and self.boxed and has_room
        return is_open and not text.startswith(_BOX)

    @property
    def awaits_next(self) -> bool:
        """Return True between two exceptions of a chain, or behind Ray's header of one."""
        is_between = bool(self.chain) and not self.text and not self.in_frames
        return is_between or bool(self.remote)


def exceptions_in(printed: str) -> list[LoggedException]:
    """Return the exceptions of all tracebacks in a text."""
    tracebacks = Tracebacks()
    chains: list[ExceptionChain] = []
    for position, line in enumerate(printed.splitlines()):
        log_line = read_line(line)
        chains += tracebacks.feed(log_line, position)
    chains += tracebacks.flush()

    exceptions: list[LoggedException] = []
    for chain in chains:
        if chain.has_traceback:
            exceptions += chain.chain
    return exceptions


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
        if line.text.startswith(_HARMLESS):
            self._harmless.add(line.source)
            return
        open_ = self._open.get(line.source)
        if HEADER in line.text:
            yield from self._begin(line, position, open_)
        elif open_ is not None:
            yield from self._go_on(open_, line, position)
        else:
            yield from self._without_header(line, position)

    def holds(self, line: LogLine) -> bool:
        """Return True if the line belongs to an open traceback and to nothing else."""
        return line.source in self._open and not self._open[line.source].in_more

    def flush(self) -> Iterator[ExceptionChain]:
        """Yield the tracebacks that were open at the end of the log."""
        for source in list(self._open):
            yield from self._end(source)

    def frames_cut_off(self) -> tuple[str, ...]:
        """Return the frames of a traceback that has no exception yet."""
        for open_ in self._open.values():
            if open_.frames and not open_.text:
                return tuple(open_.frames)
        return ()

    def _begin(
        self,
        line: LogLine,
        position: int,
        open_: _Open | None,
    ) -> Iterator[ExceptionChain]:
        is_original = line.text.startswith(_ORIGINAL)
        if open_ is not None and open_.text and is_original:
            # A loader's worker: what it failed with follows the words that it did.
            open_.close_exception()
            open_.chain.clear()
            open_.in_frames = True
            open_.noise = 0
            return
        if open_ is not None and open_.awaits_next:
            open_.in_frames = True
            open_.noise = 0
            return
        yield from self._end(line.source)
        if len(self._open) < MOST_SOURCES:
            mark, _, _ = line.text.partition(HEADER)
            is_harmless = line.source in self._harmless or line.is_remark
            self._open[line.source] = _Open(
                position=position,
                rank=line.rank,
                harmless=is_harmless,
                mark=mark,
                boxed=line.text.lstrip().startswith("╭"),
            )
        self._harmless.discard(line.source)

    def _go_on(
        self,
        open_: _Open,
        line: LogLine,
        position: int,
    ) -> Iterator[ExceptionChain]:
        text = line.text.removeprefix(open_.mark).rstrip()
        open_.in_more = False
        if open_.in_frames:
            yield from self._in_frames(open_, line, text)
        elif not text.strip(" |+-"):
            # Behind a box an empty line ends what was wrapped.
            open_.boxed = open_.boxed and not open_.text
            open_.complete = open_.complete or bool(open_.continuation)
        elif text.startswith(_CHAINED):
            open_.close_exception()
        elif open_.wraps_into(text):
            open_.wrapped += 1
            open_.text = f"{open_.text} {text.strip()}"[:_MOST_TEXT]
        elif open_.text and text[0] in " \t":
            open_.text = f"{open_.text}\n{text}"[:_MOST_TEXT]
        elif open_.goes_on_with(line, text):
            open_.continuation.append(text[:_MOST_MORE_TEXT])
            open_.in_more = True
        elif open_.text or open_.noise >= _MOST_NOISE:
            yield from self._end(line.source)
            yield from self.feed(line, position)
        else:
            open_.noise += 1

    def _in_frames(
        self,
        open_: _Open,
        line: LogLine,
        text: str,
    ) -> Iterator[ExceptionChain]:
        frame = _frame(text)
        if frame is not None:
            open_.frames.append(frame)
            open_.source_line = ""
        elif ";" in open_.source_line and _MARKS.match(text):
            open_.keep_marked_statement(text)
        elif not text or text.startswith(_INSIDE):
            open_.add_source(text)
        elif _REMOTE.search(text) is not None:
            # An exception that crossed several actors: the innermost one's places follow the last
            # of these words.
            open_.remote = text[:_MOST_TEXT]
        elif _THROWN.match(text):
            open_.text = text[:_MOST_TEXT]
            open_.in_frames = False
        else:
            open_.noise += 1
            if open_.noise > _MOST_NOISE:
                yield from self._end(line.source)

    def _without_header(self, line: LogLine, position: int) -> Iterator[ExceptionChain]:
        """Yield an exception whose traceback is missing: logs are cut, and some loggers print
        the last line alone.
        """
        text = line.text.strip()
        has_room = len(self._open) < MOST_SOURCES
        if has_room and _FRAME.match(line.text) is not None:
            # A log that was cut in the middle of a traceback.
            open_ = _Open(
                position=position,
                rank=line.rank,
                harmless=line.is_remark,
                has_header=False,
            )
            self._open[line.source] = open_
            yield from self._go_on(open_, line, position)
        elif line.is_remark or _WITHOUT_TRACEBACK.match(text) is None:
            return
        elif has_room and _REMOTE.search(text) is not None:
            self._open[line.source] = _Open(
                position=position,
                rank=line.rank,
                remote=text[:_MOST_TEXT],
            )
        else:
            exception = LoggedException(text=text[:_MOST_TEXT])
            yield ExceptionChain(
                position=position,
                rank=line.rank,
                chain=(exception,),
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


def _frame(text: str) -> str | None:
    """Return `file:function` of a frame, None for other lines."""
    for pattern in _FRAMES:
        match = pattern.match(text)
        if match is not None:
            # Places are known by their names with slashes, which Windows writes the other way.
            file = match[1].replace("\\", "/")
            function = match[2].rpartition(".")[2]
            return f"{file}:{function}"
    return None

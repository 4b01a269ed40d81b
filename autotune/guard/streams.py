"""Output of the command, copied to ours while its end is kept for the diagnosis.

A stream that is a terminal here is one for the command as well, through a pseudo-terminal of the
same size. Any other stream becomes a pipe. Standard input is passed on only if it is a terminal;
otherwise the command inherits it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import signal
import termios
import threading

from autotune.core.plain_text import without_terminal_codes

COPY_BYTES = 2**16
HEAD_BYTES = 2**16  # of the output, which names the framework
TAIL_BYTES = 2**22  # of the output, with the failure: every rank prints its own traceback
FRESH_BYTES = 2**16
LINE_BYTES = 2**16  # of an unfinished line
STDIN, STDOUT, STDERR = 0, 1, 2


class OutputTail:
    """Beginning and end of the output, and what is new since the last look.

    Lines are kept whole: an unfinished one waits for its end, so that a line of the other stream
    never begins within it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._head = b""
        self._tail = bytearray()
        self._fresh = bytearray()
        self._unfinished: dict[int, bytes] = {}  # line of each stream
        self._skipped = False

    def add(self, piece: bytes, stream: int) -> None:
        with self._lock:
            self._fresh += piece
            del self._fresh[:-FRESH_BYTES]
            begun = self._unfinished.get(stream, b"")
            lines, unfinished = _whole_lines(begun + piece)
            self._unfinished[stream] = unfinished
            self._keep(lines)

    def _keep(self, lines: bytes) -> None:
        room = HEAD_BYTES - len(self._head)
        self._head += lines[:room]
        self._tail += lines[room:]
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]
            self._skipped = True

    def fresh(self) -> str:
        """Return what was printed since the last call, at most its end."""
        with self._lock:
            fresh = bytes(self._fresh)
            self._fresh.clear()
        return _as_text(fresh)

    def text(self) -> str:
        """Return the beginning and the end of the output."""
        with self._lock:
            gap = b"\n[...]\n" if self._skipped else b""
            output = self._head + gap + bytes(self._tail)
            for unfinished in self._unfinished.values():
                if unfinished:
                    output += b"\n"
                    output += unfinished
        return _as_text(output)


def _whole_lines(text: bytes) -> tuple[bytes, bytes]:
    """Return the whole lines, and the unfinished one behind them."""
    # A bar ends with a return.
    end = max(
        text.rfind(b"\n"),
        text.rfind(b"\r"),
    )
    unfinished = text[end + 1 :]
    if len(unfinished) > LINE_BYTES:
        return text, b""
    return text[: end + 1], unfinished


def _as_text(output: bytes) -> str:
    return without_terminal_codes(output.decode(errors="replace"))


class Streams:
    """Streams of one command. The `child_` ends go to it, and are closed here by `started`."""

    def __init__(self, tail: OutputTail) -> None:
        self._tail = tail
        self._copies: list[threading.Thread] = []
        self._terminals: list[int] = []  # our ends of pseudo-terminals
        self._child_ends: list[int] = []
        self.child_stdin: int | None = None
        self.child_stdout = self._child_end_of(STDOUT)
        if _is_same(STDOUT, STDERR):
            self.child_stderr = self.child_stdout
        else:
            self.child_stderr = self._child_end_of(STDERR)
        if self._terminals and os.isatty(STDIN):
            self.child_stdin = self._child_ends[0]

    def started(self) -> None:
        """Close the child's ends, and copy what arrives at ours."""
        for end in self._child_ends:
            os.close(end)
        for thread in self._copies:
            thread.start()
        if self.child_stdin is not None:
            threading.Thread(target=self._pass_input, daemon=True).start()

    def finish(self, patience_seconds: float) -> None:
        """Wait for the last output. A process that holds the stream open is not waited for."""
        for thread in self._copies:
            thread.join(timeout=patience_seconds)

    def resize(self) -> None:
        """Give the pseudo-terminal the size of ours."""
        for terminal in self._terminals:
            _copy_size(STDOUT if os.isatty(STDOUT) else STDERR, terminal)

    def _child_end_of(self, stream: int) -> int:
        if os.isatty(stream):
            our_end, child_end = self._pseudo_terminal(stream)
        else:
            our_end, child_end = os.pipe()
        self._child_ends.append(child_end)
        copy = threading.Thread(
            target=self._copy,
            args=(our_end, stream),
            daemon=True,
        )
        self._copies.append(copy)
        return child_end

    def _pseudo_terminal(self, stream: int) -> tuple[int, int]:
        our_end, child_end = pty.openpty()
        attributes = termios.tcgetattr(stream)
        # Our own terminal ends lines and echoes what is typed; twice would be seen.
        attributes[1] &= ~termios.OPOST
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(child_end, termios.TCSANOW, attributes)
        _copy_size(stream, child_end)
        self._terminals.append(our_end)
        return our_end, child_end

    def _copy(self, source: int, target: int) -> None:
        """Copy until the last writer has closed. Without a reader of ours, the command has none."""
        with contextlib.suppress(OSError):  # a pseudo-terminal whose writers have closed
            while piece := os.read(source, COPY_BYTES):
                self._tail.add(piece, target)
                if not _is_written(target, piece):
                    break
        os.close(source)

    def _pass_input(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
        with contextlib.suppress(OSError):  # in the background, or after the command's end
            while piece := os.read(STDIN, COPY_BYTES):
                os.write(self._terminals[0], piece)


def _is_written(target: int, piece: bytes) -> bool:
    """Write all of it; return False if the reader is gone. A full disk drops the output."""
    view = memoryview(piece)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            continue
        except OSError as error:
            return error.errno != errno.EPIPE
    return True


def _is_same(first: int, second: int) -> bool:
    """Return True if two descriptors are one file, pipe or terminal."""
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False


def _copy_size(source: int, target: int) -> None:
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)

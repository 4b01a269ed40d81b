"""JSON objects, one a line, over a connected socket: the only way the processes of a rig talk.

A line that is no JSON object is counted and skipped: a process that is killed while it writes
leaves half a line behind, and that must not take the conversation down with it.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from typing import Any

Message = dict[str, Any]

LONGEST_LINE = 128 * 2**20
"""Beyond any trace of a step: the longest thing that is said."""

_PIECE = 2**18


class Wire:
    """One end of a conversation."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        self._sending = threading.Lock()
        self.closed = False
        """True once the other end is gone."""
        self.broken_lines = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """False, and `closed`, when nobody is there to hear it."""
        # A line begins with a line feed of its own, so that half a line before it cannot swallow it.
        line = b"\n" + json.dumps(message, default=str).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError:
            self.closed = True
        return not self.closed

    def take(self, timeout_seconds: float | None = None) -> list[Message]:
        """The messages that are here, after waiting at most so long for the first bytes. None waits for ever."""
        if not self.closed and self._readable(timeout_seconds):
            try:
                received = self._socket.recv(_PIECE)
            except OSError:
                received = b""
            self.closed = self.closed or not received
            self._buffer += received
            # A long line comes in many pieces, and only the last of them ends it.
            return self._complete_lines() if b"\n" in received or len(self._buffer) > LONGEST_LINE else []
        return []

    def take_rest(self) -> list[Message]:
        """Everything that was said before the other end fell silent, without waiting."""
        messages = self.take(0)
        while not self.closed and self._readable(0):
            messages += self.take(0)
        return messages

    def hang_up(self) -> None:
        """From any thread: whoever waits on either end stops waiting. The socket itself stays until `close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    def _readable(self, timeout_seconds: float | None) -> bool:
        # poll, not select: a rank may well have more than 1024 files open.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout_seconds is None else max(0.0, timeout_seconds) * 1000))

    def _complete_lines(self) -> list[Message]:
        *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > LONGEST_LINE:
            self._buffer = b""
            self.broken_lines += 1
        return [message for message in map(self._parse, filter(None, lines)) if message is not None]

    def _parse(self, line: bytes) -> Message | None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):  # brackets within brackets, a thousand deep, are no message either
            message = None
        if not isinstance(message, dict):
            self.broken_lines += 1
            return None
        return message

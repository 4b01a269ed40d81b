"""Wire between the parent and the processes of a probe: JSON lines over a socket.

Both sides import this module. A message starts and ends with a line feed, so a half-written line of
a killed process cannot swallow it. A line that is no JSON object is counted and skipped.

The parent sends commands; the worker and its ranks reply with events, whose fields and limits
`probe/message_validation.py` states. Fields are absent, or null, where they do not apply. An
unknown figure is null, never 0.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Mapping
from json import JSONDecoder, JSONEncoder
from typing import Any

Message = dict[str, Any]  # command or event, not yet validated

Request = Mapping[str, Any]
"""Load, measurement or trace that an adapter receives, or a part of one; its fields are the
adapter's.
"""

Settings = Mapping[str, Any]
"""A framework's own settings, by the framework's names."""

Arguments = dict[str, Any]
"""Settings, or keyword arguments of a function, that are put together or read."""

Result = dict[str, Any]
"""Part of what a probe or a trace reports, as JSON."""

# Commands: parent to worker. `do` is one of these; `id` returns in the replies.

# Import everything that `load`, the adapter's request, needs; answered by READY or UNREADY.
WARM = "warm"
# End the ranks, fork `ranks` new ones and load in each. `devices`: others_bytes, cap_bytes and
# engine_share_scale of each. `span`: first rank here, ranks of all machines (world), address and
# port where they meet; null where all are here.
LOAD = "load"
# Measure the candidate of `request`, defined by the adapter, in each rank. `guard_bytes`: growth
# that remains for each rank up to the machine's memory limit; `slack_bytes`: memory beyond it that
# a rank may map without touching it, where a cgroup counts touched pages; `device_limit_bytes`:
# limit of each rank on its own GPU.
MEASURE = "measure"
UNLOAD = "unload"  # end the ranks, keep the worker
QUIT = "quit"

# Events: worker to parent.
ENVIRONMENT_EVENT = "environment"  # installed versions, before any heavy import
# Imports are done. `afresh`: reason to start each rank as an interpreter of its own.
READY = "ready"
UNREADY = "unready"  # imports failed: `error`
LOST = "lost"  # a rank exited without reporting: `signal` or `exit`
UNLOADED = "unloaded"
STUCK = "stuck"  # `pids` cannot be ended, because a device driver holds them

# Events: rank to parent; the worker adds `rank`.
LOADING_EVENT = "loading"
LOADED = "loaded"  # `bytes`: held after the load; `result`: `Memory` during it
PHASE = "phase"  # at each change of phase
CYCLE = "cycle"  # `done` cycles of `of`, the last with its `seconds` and `tokens`
PROGRESS = "moves"  # `words`: latest progress, which separates slow from hung at a deadline
MEASURED = "measured"
FAILED = "failed"

PHASES = ("load", "rollout", "sync", "reward", "score", "forward", "backward", "optimizer")
OTHER_PHASE = "other"  # time that belongs to none of PHASES

MAX_MESSAGE_BYTES = 128 * 2**20  # larger than any trace of a step, which is the longest message
_RECEIVE_BYTES = 2**18

# Bound before the user's script runs, which may replace `json.dumps` by another library's.
encode = JSONEncoder(default=str).encode
decode = JSONDecoder().decode


class Wire:
    """End of the socket that sends and receives messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        self._sending = threading.Lock()
        self.closed = False  # true once the other end is gone
        self.broken_lines = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Send a message. Return False, and set `closed`, if the other end is gone."""
        line = f"\n{encode(message)}\n".encode()
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError:
            self.closed = True
        return not self.closed

    def take(self, timeout_seconds: float | None = None) -> list[Message]:
        """Return the received messages; wait at most `timeout_seconds` (None: no limit)."""
        if self.closed or not self._readable(timeout_seconds):
            return []
        try:
            received = self._socket.recv(_RECEIVE_BYTES)
        except OSError:
            received = b""
        self.closed = self.closed or not received
        self._buffer += received
        # A long line arrives in many pieces, and only the last of them ends it.
        if b"\n" not in received and len(self._buffer) <= MAX_MESSAGE_BYTES:
            return []
        *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > MAX_MESSAGE_BYTES:
            self._buffer = b""
            self.broken_lines += 1
        messages = []
        for line in lines:
            if not line:
                continue
            message = _parse(line)
            if message is None:
                self.broken_lines += 1
            else:
                messages.append(message)
        return messages

    def take_rest(self) -> list[Message]:
        """Return everything that arrived before the other end closed, without waiting."""
        messages = self.take(0)
        while not self.closed and self._readable(0):
            messages += self.take(0)
        return messages

    def hang_up(self) -> None:
        """End all waiting on either end, from any thread. The socket itself stays until `close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    def _readable(self, timeout_seconds: float | None) -> bool:
        # poll, not select: a rank may have more than 1024 files open.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        timeout_ms = None
        if timeout_seconds is not None:
            timeout_ms = max(0.0, timeout_seconds) * 1000
        return bool(poll.poll(timeout_ms))


def _parse(line: bytes) -> Message | None:
    """Return a line's JSON object; None if it has none."""
    try:
        message = decode(line.decode())
    except (ValueError, RecursionError):  # RecursionError: brackets nested a thousand deep
        return None
    return message if isinstance(message, dict) else None

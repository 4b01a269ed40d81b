"""What a rig's processes print: pumped into a log of bounded size, the last of it kept at hand to name a failure.

Nothing secret gets as far as that: what the environment holds in secret is taken out before anything is written or kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from autotune.secrets import LONGEST, Secrets

TURN_BYTES = 2**20
"""A log file is turned over at this size; one older file is kept."""

TAIL_BYTES = 2**16

PIPE_BYTES = 2**20
"""Of the pipe, where the kernel allows it: with its usual 64 KiB whoever floods it is stopped sixteen times as often."""


class OutputLog:
    """Reads a pipe until every writer is gone."""

    def __init__(self, path: Path, older: Path, environment: Mapping[str, str] = os.environ) -> None:
        self._path, self._older = path, older
        self._read, self.write_end = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._secrets = Secrets(environment)
        self._held = b""
        """The end of what was printed, as long as a secret may have begun in it."""
        self._tail = b""
        self._seen = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._pump, name="autotune-output", daemon=True)

    def start(self) -> None:
        """Once the child has the write end: ours is closed, so that the pipe ends with the last of its processes."""
        os.close(self.write_end)
        self._thread.start()

    def mark(self) -> int:
        """A place in the output, for `since`."""
        with self._lock:
            return self._seen + len(self._held)

    def since(self, mark: int) -> str:
        """What was printed after `mark`, as far as it is still at hand."""
        with self._lock:
            at_hand = self._tail + self._hidden(self._held)
            printed = max(0, min(self._seen + len(self._held) - mark, len(at_hand)))
            text = at_hand[len(at_hand) - printed :]
        return text.decode(errors="replace")

    def settle(self, patience_seconds: float = 0.5) -> None:
        """Let the pump catch up with what is already in the pipe."""
        deadline = time.monotonic() + patience_seconds
        while self._thread.is_alive() and self._waiting_bytes() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.005)

    def close(self) -> None:
        self._thread.join(timeout=1.0)

    def _waiting_bytes(self) -> int:
        try:
            answer = fcntl.ioctl(self._read, termios.FIONREAD, b"\0\0\0\0")
        except OSError:
            return 0
        count: int = struct.unpack("i", answer)[0]
        return count

    def _pump(self) -> None:
        size = 0
        file = self._path.open("wb")
        try:
            more = True
            while more:
                piece = os.read(self._read, PIPE_BYTES)
                more = bool(piece)
                shown = self._keep(piece) if more else self._keep(b"", last=True)
                if size and size + len(shown) > TURN_BYTES:
                    file.close()
                    self._path.replace(self._older)
                    file, size = self._path.open("wb"), 0
                file.write(shown)
                file.flush()
                size += len(shown)
        except OSError:  # the folder is gone or full: nothing to tell anybody
            self._drain()
        finally:
            file.close()
            os.close(self._read)

    def _keep(self, piece: bytes, *, last: bool = False) -> bytes:
        """What can be shown now that this has come too: up to the last gap between words, where nothing secret is cut."""
        with self._lock:
            text = self._hidden(self._held + piece)
            gap = max(text.rfind(b" "), text.rfind(b"\n"), text.rfind(b"\r")) + 1
            cut = len(text) if last else max(gap, len(text) - LONGEST)
            shown, self._held = text[:cut], text[cut:]
            self._tail = (self._tail + shown)[-TAIL_BYTES:]
            self._seen += len(shown)
        return shown

    def _hidden(self, text: bytes) -> bytes:
        # latin-1 keeps every byte as it is, whatever the processes wrote.
        return self._secrets.hide(text.decode("latin-1")).encode("latin-1")

    def _drain(self) -> None:
        while os.read(self._read, PIPE_BYTES):
            pass

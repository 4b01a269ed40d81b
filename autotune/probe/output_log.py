"""Output of a worker's processes, from a pipe to a bounded log; the tail stays for diagnosis.

Secrets of the environment are masked before anything is written or stored.
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

from autotune.core.secrets import MAX_SECRET_LENGTH, Secrets

MAX_LOG_BYTES = 2**20  # Size at which a log file is rotated; one older file is kept
TAIL_BYTES = 2**16

PIPE_BYTES = 2**20  # Pipe capacity, if allowed: the default of 64 KiB blocks a busy writer 16 times as often
MAX_BLOCK_BYTES = 2**14  # Longest block of a private key that is waited for


def _open_block(text: bytes) -> int:
    """Return the position of a private key whose end has not arrived; the length without one."""
    begin = text.rfind(b"-----BEGIN ", max(0, len(text) - MAX_BLOCK_BYTES))
    return len(text) if begin < 0 or b"-----END " in text[begin:] or b"CERTIFICATE" in text[begin : begin + 40] else begin


class OutputLog:
    """Reader of a pipe, until its last writer exits."""

    def __init__(self, path: Path, older: Path, environment: Mapping[str, str] = os.environ) -> None:
        self._path, self._older = path, older
        self._read, self.write_end = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._secrets = Secrets(environment)
        self._held = b""  # End of the output that may contain the start of a secret
        self._tail = b""
        self._seen = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._pump, name="autotune-output", daemon=True)

    def start(self) -> None:
        """Close our copy of the write end, which the child has inherited, and start to read."""
        os.close(self.write_end)
        self._thread.start()

    def mark(self) -> int:
        """Return a position in the output, for `since`."""
        with self._lock:
            return self._seen + len(self._held)

    def since(self, mark: int) -> str:
        """Return the output after `mark`, as far as the tail reaches."""
        with self._lock:
            tail = self._tail + self._masked(self._held)
            printed = max(0, min(self._seen + len(self._held) - mark, len(tail)))
            text = tail[len(tail) - printed :]
        return text.decode(errors="replace")

    def settle(self, patience_seconds: float = 0.5) -> None:
        """Wait until the reader has caught up with the pipe."""
        deadline = time.monotonic() + patience_seconds
        while self._thread.is_alive() and self._waiting_bytes() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.005)

    def close(self) -> None:
        self._thread.join(timeout=1.0)

    def _waiting_bytes(self) -> int:
        try:
            return int(struct.unpack("i", fcntl.ioctl(self._read, termios.FIONREAD, b"\0\0\0\0"))[0])
        except OSError:
            return 0

    def _pump(self) -> None:
        size = 0
        file = self._path.open("wb")
        try:
            more = True
            while more:
                piece = os.read(self._read, PIPE_BYTES)
                more = bool(piece)
                shown = self._take(piece, last=not more)
                if size and size + len(shown) > MAX_LOG_BYTES:
                    file.close()
                    self._path.replace(self._older)
                    file, size = self._path.open("wb"), 0
                file.write(shown)
                file.flush()
                size += len(shown)
        except OSError:  # the folder is removed or full: keep the writers from blocking
            while os.read(self._read, PIPE_BYTES):
                pass
        finally:
            file.close()
            os.close(self._read)

    def _take(self, piece: bytes, *, last: bool = False) -> bytes:
        """Return the text up to the last gap between words, so that no secret is cut in two."""
        with self._lock:
            whole = self._held + piece
            # A key block has gaps; what follows its open beginning waits for its end.
            begin = len(whole) if last else _open_block(whole)
            text, rest = self._masked(whole[:begin]), whole[begin:]
            gap = max(text.rfind(b" "), text.rfind(b"\n"), text.rfind(b"\r")) + 1
            cut = len(text) if last else max(gap, len(text) - MAX_SECRET_LENGTH)
            cut = len(text) if rest else cut
            shown, self._held = text[:cut], text[cut:] + rest
            self._tail = (self._tail + shown)[-TAIL_BYTES:]
            self._seen += len(shown)
        return shown

    def _masked(self, text: bytes) -> bytes:
        # Bytes that are no UTF-8, and halves of characters, come back as they were.
        return self._secrets.hide(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

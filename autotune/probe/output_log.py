"""Output of a worker's processes: rotated, without secrets."""

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

from autotune.core.plain_text import without_terminal_codes
from autotune.core.secrets import MAX_SECRET_LENGTH, Secrets

MAX_LOG_BYTES = 2**20  # Size at which a log file is rotated; one older file is kept

WORKER_TAIL_BYTES = 2**16

# Pipe capacity, if allowed: the default of 64 KiB blocks a busy writer 16 times as often.
PIPE_BYTES = 2**20

MAX_BLOCK_BYTES = 2**14  # Longest block of a private key that is waited for


def _open_block(text: bytes) -> int:
    """Return the position of a private key whose end has not arrived; the length without one."""
    begin = text.rfind(b"-----BEGIN ", max(0, len(text) - MAX_BLOCK_BYTES))
    if begin < 0 or b"-----END " in text[begin:]:
        return len(text)
    is_public = b"CERTIFICATE" in text[begin : begin + 40]
    return len(text) if is_public else begin


class OutputLog:
    """Reader of a pipe, until its last writer exits."""

    def __init__(
        self,
        path: Path,
        older: Path,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._path = path
        self._older = older
        self._read, self.write_end = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._secrets = Secrets(environment)
        self._pending = b""  # end of the output that may contain the start of a secret
        self._tail = b""
        self._seen = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._pump,
            name="autotune-output",
            daemon=True,
        )

    def start(self) -> None:
        """Close our copy of the write end, which the child has inherited, and start to read."""
        os.close(self.write_end)
        self._thread.start()

    def mark(self) -> int:
        """Return a position in the output, for `since`."""
        with self._lock:
            return self._seen + len(self._pending)

    def since(self, mark: int) -> str:
        """Return the output after `mark`, as far as the tail reaches, as plain text."""
        with self._lock:
            tail = self._tail + self._masked(self._pending)
            printed = max(0, min(self._seen + len(self._pending) - mark, len(tail)))
            text = tail[len(tail) - printed :]
        return without_terminal_codes(text.decode(errors="replace"))

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
            reply = fcntl.ioctl(self._read, termios.FIONREAD, b"\0\0\0\0")
        except OSError:
            return 0
        return int(struct.unpack("i", reply)[0])

    def _pump(self) -> None:
        size = 0
        file = self._path.open("wb")
        try:
            is_open = True
            while is_open:
                piece = os.read(self._read, PIPE_BYTES)
                is_open = bool(piece)
                shown = self._take(piece, last=not is_open)
                if size and size + len(shown) > MAX_LOG_BYTES:
                    file.close()
                    self._path.replace(self._older)
                    file = self._path.open("wb")
                    size = 0
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
            output = self._pending + piece
            # A key block has gaps; what follows its open beginning waits for its end.
            begin = len(output) if last else _open_block(output)
            text = self._masked(output[:begin])
            open_block = output[begin:]
            cut = len(text)
            if not last and not open_block:
                gap = max(text.rfind(b" "), text.rfind(b"\n"), text.rfind(b"\r")) + 1
                cut = max(gap, len(text) - MAX_SECRET_LENGTH)
            shown = text[:cut]
            self._pending = text[cut:] + open_block
            self._tail = (self._tail + shown)[-WORKER_TAIL_BYTES:]
            self._seen += len(shown)
        return shown

    def _masked(self, text: bytes) -> bytes:
        # Bytes that are no UTF-8, and halves of characters, come back as they were.
        masked = self._secrets.hide(text.decode("utf-8", "surrogateescape"))
        return masked.encode("utf-8", "surrogateescape")

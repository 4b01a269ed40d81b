"""What a rig's processes print: pumped into a log of bounded size, the last of it kept at hand to name a failure."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import threading
import time
from pathlib import Path

TURN_BYTES = 2**20
"""A log file is turned over at this size; one older file is kept."""

TAIL_BYTES = 2**16


class OutputLog:
    """Reads a pipe until every writer is gone."""

    def __init__(self, path: Path, older: Path) -> None:
        self._path, self._older = path, older
        self._read, self.write_end = os.pipe()
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
            return self._seen

    def since(self, mark: int) -> str:
        """What was printed after `mark`, as far as it is still at hand."""
        with self._lock:
            printed = min(self._seen - mark, len(self._tail))
            text = self._tail[len(self._tail) - printed :]
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
            while piece := os.read(self._read, 2**16):
                with self._lock:
                    self._tail = (self._tail + piece)[-TAIL_BYTES:]
                    self._seen += len(piece)
                if size > TURN_BYTES:
                    file.close()
                    self._path.replace(self._older)
                    file, size = self._path.open("wb"), 0
                file.write(piece)
                file.flush()
                size += len(piece)
        except OSError:  # the folder is gone or full: nothing to tell anybody
            self._drain()
        finally:
            file.close()
            os.close(self._read)

    def _drain(self) -> None:
        while os.read(self._read, 2**16):
            pass

"""Output into a pipe whose reader has left: `autotune predict ... | head -1` is no error."""

from __future__ import annotations

import os
from typing import Any, TextIO


class PipeOutput:
    """Text stream that discards its output once nobody reads it. The command goes on and keeps its
    exit code."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard()

    def _discard(self) -> None:
        # The stream keeps its unwritten text, which goes to the null device with its next flush.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

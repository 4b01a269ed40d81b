"""The real program on a real pseudo-terminal: what a person sees, in a width of their own."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cli.command import PROGRAM, environment

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


def terminal_output(*arguments: str, cwd: Path, columns: int, **variables: str) -> str:
    """Its bytes, colours and all."""
    variables_set = environment(TERM="xterm-256color", **{"COLUMNS": str(columns), **variables})
    if "NO_COLOR" not in variables:
        variables_set.pop("NO_COLOR", None)
    written, _ = watched(
        [*PROGRAM, *arguments], ("stdout", "stderr", "stdin"), env=variables_set, cwd=cwd
    )
    return written


def watched(command: Sequence[str], streams: Sequence[str], **how: Any) -> tuple[str, int]:
    """Return the terminal output of a command and its exit code."""
    controller, terminal = pty.openpty()
    with subprocess.Popen(command, **dict.fromkeys(streams, terminal), **how) as process:
        os.close(terminal)
        written = b""
        while select.select([controller], [], [], 120)[0]:
            try:
                block = os.read(controller, 65536)
            except OSError:  # Linux's way to say that the other side is closed
                break
            if not block:
                break
            written += block
        code = process.wait(timeout=60)
    os.close(controller)
    return written.decode(), code


def lines(text: str) -> list[str]:
    """Strip cursor movements and colours."""
    return [
        line.rpartition("\r")[2]
        for line in _ESCAPES.sub("", text).replace("\r\n", "\n").splitlines()
    ]

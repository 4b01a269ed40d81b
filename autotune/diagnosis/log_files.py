"""Log files: refused with an alternative where they are no text, else read once, in blocks,
without holding them in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from autotune.core.errors import BadInput
from autotune.core.units import GIB, format_bytes

# A larger file takes minutes to read, and its last part is enough.
LARGEST_LOG_BYTES = 4 * GIB

# Bytes that are kept of a longer line, half of them from its end: launchers print the exit code
# last.
LONGEST_LINE = 2**15

READ_BYTES = 2**20
_HEAD_BYTES = 2**16
_MAGIC = {
    b"\x1f\x8b": "gzip -dc",
    b"BZh": "bzip2 -dc",
    b"\xfd7zXZ": "xz -dc",
    b"(\xb5/\xfd": "zstd -dc",
    b"PK\x03\x04": "unzip -p",
}
_CONTROL = bytes(code for code in range(32) if code not in b"\t\n\r\x08\x1b\x0c")


def lines_of_file(log: str) -> Iterator[str]:
    """Yield the lines. Raises BadInput at the first line where the file can't be read as a log."""
    _refuse_what_is_no_file(log)
    try:
        with Path(log).open("rb") as stream:
            yield from lines_of_stream(stream, repr(log), log)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(
            f"{log!r} can't be read: {reason}.",
            way_out="Name a log file, or - to read standard input.",
        ) from error


def lines_of_stream(
    stream: BinaryIO,
    name: str,
    log: str = "-",
) -> Iterator[str]:
    """Yield the lines of an open stream; `name` is used in messages, `log` in the command that
    they suggest.
    """
    head = stream.read(_HEAD_BYTES)
    _refuse_what_is_no_text(name, log, head)
    empty = True
    for line in lines_of(stream, head):
        empty = empty and not line.strip()
        yield line
    if empty:
        raise BadInput(
            f"{name} holds no text.",
            way_out=(
                "Errors go to standard error: collect both, as in `python train.py > train.log"
                " 2>&1`."
            ),
        )


def lines_of(stream: BinaryIO, head: bytes = b"") -> Iterator[str]:
    r"""Yield text lines of bounded length, ended by \n, \r or both. Undecodable bytes are
    replaced. `head` was read before.
    """
    pending = b""
    blocks = iter(lambda: stream.read(READ_BYTES), b"")
    for block in itertools.chain([head], blocks):
        # A progress bar is redrawn by \r: each drawing is a line, and so is a text over it.
        text = (pending + block).replace(b"\r", b"\n")
        lines = text.split(b"\n")
        for line in lines[:-1]:
            shortened = _shortened(line)
            yield shortened.decode("utf-8", errors="replace")
        pending = _shortened(lines[-1])
    yield pending.decode("utf-8", errors="replace")


def _shortened(line: bytes) -> bytes:
    """Return a line of at most LONGEST_LINE bytes: the beginning and the end."""
    half = LONGEST_LINE // 2
    if len(line) <= LONGEST_LINE:
        return line
    return line[:half] + line[-half:]


def _refuse_what_is_no_file(log: str) -> None:
    path = Path(log)
    try:
        is_folder = path.is_dir()
        size = path.stat().st_size if path.is_file() else 0
        # A shell's <(...) is a link to a pipe that has its writer.
        is_pipe = path.is_fifo() and not path.is_symlink()
    except (OSError, ValueError):
        return
    if is_folder:
        raise BadInput(
            f"{log!r} is a folder, and a log is a file.",
            way_out=(
                f"Name one file in it, or read all of them: cat {log.rstrip('/')}/*.log | autotune"
                " diagnose -"
            ),
        )
    if is_pipe:
        raise BadInput(
            f"{log!r} is a pipe, and a log is a file.",
            way_out=f"Read it: autotune diagnose - < {log}",
        )
    if size > LARGEST_LOG_BYTES:
        raise BadInput(
            f"{log!r} has {format_bytes(size)}, and files of up to"
            f" {format_bytes(LARGEST_LOG_BYTES)} are read.",
            way_out=f"Read its end: tail -c 500M {log} | autotune diagnose -",
        )


def _refuse_what_is_no_text(
    name: str,
    log: str,
    head: bytes,
) -> None:
    for magic, program in _MAGIC.items():
        if head.startswith(magic):
            raise BadInput(
                f"{name} is compressed, and a log is text.",
                way_out=f"Unpack it: {program} {log} | autotune diagnose -",
            )
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadInput(
            f"{name} is text in UTF-16, and logs are read as UTF-8.",
            way_out=f"Convert it: iconv -f UTF-16 -t UTF-8 {log} | autotune diagnose -",
        )
    text = head.translate(None, _CONTROL)
    control = len(head) - len(text)
    if control > 0.1 * max(len(head), 1):
        raise BadInput(
            f"{name} is binary: {control} of its first {len(head)} bytes are no text.",
            way_out="Name the file that holds what the training printed.",
        )

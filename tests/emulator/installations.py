"""Environments that are not there: as much of one as the emulator looks at before it compiles."""

from __future__ import annotations

import struct
import sys
from pathlib import Path


def elf(*, needed: tuple[str, ...] = (), defined: tuple[str, ...] = ()) -> bytes:
    """Return a shared library's file with these names and nothing behind them."""
    strings, places = b"\0", {}
    for name in (*needed, *defined):
        places[name] = len(strings)
        strings += name.encode() + b"\0"
    symbols = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    symbols += b"".join(
        struct.pack("<IBBHQQ", places[name], 0x12, 0, 1, 0x1000, 8) for name in defined
    )
    dynamic = b"".join(struct.pack("<QQ", 1, places[name]) for name in needed) + struct.pack(
        "<QQ", 0, 0
    )
    bodies = [(0, b"", 0), (3, strings, 0), (11, symbols, 1), (6, dynamic, 1)]
    at, headers, content = 64, b"", b""
    for kind, body, link in bodies:
        headers += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, len(body), link, 0, 8, 0)
        content += body
        at += len(body)
    head = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, at, 0, 64, 0, 0, 64, len(bodies), 0)
    )
    return head + content + headers


def environment(
    folder: Path,
    *,
    cuda: str | None = "'13.0'",
    version: str = "2.13.0",
    runtime: str = "libcudart.so.13",
) -> Path:
    """Return the interpreter of an environment whose torch is nothing but the files that are
    looked at.
    """
    torch = folder / "site/torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text(
        f"__version__ = '{version}'\ndebug = False\ncuda: str | None = {cuda}\n"
    )
    (torch / "lib/libc10_cuda.so").write_bytes(elf(needed=(runtime, "libc.so.6")))
    python = folder / "python"
    # -S: without the test's own site-packages, and their torch.
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/site exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python

"""Names that a shared library defines and needs, read from the file itself: no binutils are required."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

_NEEDED, _DYNAMIC, _SYMBOLS = 1, 6, 11
_FUNCTION, _INDIRECT = 2, 10


class ElfError(Exception):
    """A file that is no 64-bit little-endian ELF library."""


def defined_in(path: Path) -> frozenset[str]:
    """Return the functions that the library exports."""
    entries = _entries(path, _SYMBOLS, "<IBBHQQ")
    return frozenset(
        text(name) for text, (name, info, _, section, _, _) in entries if section and info & 15 in (_FUNCTION, _INDIRECT)
    )


def needed_by(path: Path) -> tuple[str, ...]:
    """Return the libraries that the loader brings along with it."""
    return tuple(text(value) for text, (tag, value) in _entries(path, _DYNAMIC, "<QQ") if tag == _NEEDED)


def _entries(path: Path, kind: int, layout: str) -> Iterator[tuple[Callable[[int], str], tuple[int, ...]]]:
    """Yield the entries of every section of this kind, with the function that reads a name of theirs."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ElfError("no 64-bit ELF file")
        try:
            (table,) = struct.unpack_from("<Q", data, 40)
            width, count = struct.unpack_from("<HH", data, 58)
            sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + width * index) for index in range(count)]
        except struct.error as error:
            raise ElfError("a broken section table") from error
        size = struct.calcsize(layout)
        for _, section_kind, _, _, offset, length, link, *_ in sections:
            if section_kind == kind and link < len(sections):
                text = partial(_text, data, sections[link][4])
                for at in range(offset, offset + length - size + 1, size):
                    yield text, struct.unpack_from(layout, data, at)


def _text(data: mmap.mmap, names: int, at: int) -> str:
    return data[names + at : data.find(b"\0", names + at)].decode(errors="replace")

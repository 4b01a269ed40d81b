"""Names that a shared library defines and needs, read from the file itself: no binutils are required."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

_NEEDED, _DYNAMIC, _SYMBOLS = 1, 6, 11
_FUNCTION, _INDIRECT = 2, 10


class ElfError(Exception):
    """A file that is no 64-bit little-endian ELF library."""


class _Section:
    def __init__(self, header: tuple[int, ...]) -> None:
        _, self.kind, _, _, self.offset, self.size, self.link, _, _, self.entry = header


class _Library:
    """Open file whose sections are read on demand."""

    def __init__(self, data: mmap.mmap) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ElfError("no 64-bit ELF file")
        self._data = data
        try:
            (offset,) = struct.unpack_from("<Q", data, 40)
            size, count = struct.unpack_from("<HH", data, 58)
            self.sections = [_Section(struct.unpack_from("<IIQQQQIIQQ", data, offset + size * index)) for index in range(count)]
        except struct.error as error:
            raise ElfError("a broken section table") from error

    def entries(self, kind: int, layout: str) -> Iterator[tuple[_Section, tuple[int, ...]]]:
        """Yield the entries of every section of this kind, with the section that holds their names."""
        size = struct.calcsize(layout)
        for section in self.sections:
            if section.kind == kind and section.link < len(self.sections):
                names = self.sections[section.link]
                for at in range(section.offset, section.offset + section.size - size + 1, size):
                    yield names, struct.unpack_from(layout, self._data, at)

    def text(self, names: _Section, at: int) -> str:
        start = names.offset + at
        end = self._data.find(b"\0", start)
        return self._data[start:end].decode(errors="replace")


def defined_in(path: Path) -> frozenset[str]:
    """Return the functions that the library exports."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        library = _Library(data)
        found = set()
        for names, (name, info, _, section, _, _) in library.entries(_SYMBOLS, "<IBBHQQ"):
            if section and info & 15 in (_FUNCTION, _INDIRECT):
                found.add(library.text(names, name))
        return frozenset(found)


def needed_by(path: Path) -> tuple[str, ...]:
    """Return the libraries that the loader brings along with it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        library = _Library(data)
        return tuple(library.text(names, value) for names, (tag, value) in library.entries(_DYNAMIC, "<QQ") if tag == _NEEDED)

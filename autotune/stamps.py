"""What tells that a file, a folder or a hub repository is still the one it was, without reading it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from autotune.models import hub_cache

MOST_FILES = 20_000
LONGEST_NAME = 1024


def stamp(name: str, *, repository: str = "models") -> str | None:
    """A local file or folder by the sizes and times of all its files; a hub id by the commit that is in the cache.

    None for what is neither, and for a folder too large to look through: nothing is known of it, so nothing may be concluded.
    """
    if not name.strip() or "\0" in name or len(name) > LONGEST_NAME:
        return None
    path = Path(name).expanduser()
    if path.is_file():
        return _of([path], path.parent)
    if path.is_dir():
        files = _files_below(path)
        return None if files is None else _of(files, path)
    return _commit(name, repository)


def _files_below(folder: Path) -> list[Path] | None:
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders.sort()
        found += [Path(place, file) for file in sorted(files)]
        if len(found) > MOST_FILES:
            return None
    return found


def _of(files: list[Path], below: Path) -> str | None:
    marks = hashlib.sha256()
    try:
        for file in files:
            status = file.stat()
            marks.update(
                f"{file.relative_to(below)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape")
            )
    except OSError:  # it changes while it is looked at
        return None
    return marks.hexdigest()[:16]


def _commit(hub_id: str, repository: str) -> str | None:
    try:
        return (hub_cache() / f"{repository}--{hub_id.replace('/', '--')}" / "refs" / "main").read_text().strip() or None
    except (OSError, ValueError):
        return None

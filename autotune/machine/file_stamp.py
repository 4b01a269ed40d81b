"""Change detection for a file, folder or hub repository without reading its content."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from autotune.catalog.model_lookup import hub_cache
from autotune.core.errors import BadInput
from autotune.core.files import read_text

MAX_FILES = 20_000
MAX_NAME_LENGTH = 1024


def stamp(name: str, *, repository: str = "models") -> str | None:
    """Hash the sizes and times of local files; for a hub id return the cached commit.

    None: neither exists, or the folder has more than MAX_FILES files.
    """
    if not name.strip() or "\0" in name or len(name) > MAX_NAME_LENGTH:
        return None
    path = Path(name).expanduser()
    if path.is_file():
        return _of([path], path.parent)
    if path.is_dir():
        files: list[Path] = []
        for place, folders, names in os.walk(path):
            folders.sort()
            files += [Path(place, file) for file in sorted(names)]
            if len(files) > MAX_FILES:
                return None
        return _of(files, path)
    try:
        ref = hub_cache() / f"{repository}--{name.replace('/', '--')}" / "refs" / "main"
        return read_text(ref, largest_bytes=1024, way_out="").strip() or None
    except BadInput:
        return None


def _of(files: list[Path], below: Path) -> str | None:
    marks = hashlib.sha256()
    try:
        for file in files:
            status = file.stat()
            marks.update(
                f"{file.relative_to(below)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape")
            )
    except OSError:  # changed while reading
        return None
    return marks.hexdigest()[:16]

"""Files that a launch names, wherever its author started it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def file_here(
    name: str,
    script: str,
    started_in: str = "",
) -> Path | None:
    """Return the file of a launch: in the folder in which it is started, beside the script, or
    below this folder where the path of another machine ends like it.

    `started_in`: the folder to which the script changes, which may be of another machine.
    """
    path = Path(name).expanduser()
    for place in _places(path, script, started_in):
        if place.is_file():
            return place
    return None


def file_here_or_as_named(
    name: str,
    script: str,
    started_in: str = "",
) -> Path:
    """Return the file of a launch here; where there is none, the path as it is."""
    return file_here(name, script, started_in) or Path(name).expanduser()


def _places(
    path: Path,
    script: str,
    started_in: str,
) -> Iterator[Path]:
    yield path
    if path.is_absolute():
        yield from _ends_of(path)
        return
    yield Path(script).parent / path
    if started_in:
        folder = Path(started_in)
        yield folder / path
        yield from _ends_of(folder / path, fewest_parts=max(1, len(path.parts)))
    yield from _above(Path(script), path)


def _ends_of(
    path: Path,
    *,
    fewest_parts: int = 1,
) -> Iterator[Path]:
    """Yield the path without its first folders: `/home/me/project/src/a.py` is `src/a.py` here.

    `fewest_parts`: those that a launch names itself: its `src/a.py` is no other `a.py`.
    """
    _, *parts = path.parts
    while len(parts) >= fewest_parts:
        yield Path(*parts)
        del parts[0]


def _above(script: Path, path: Path) -> Iterator[Path]:
    """Yield the place below each folder above the script, the nearest first."""
    for folder in script.parents:
        yield folder / path

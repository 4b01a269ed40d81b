"""Text and commands of a launch, and the files that it names, wherever its author started it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from autotune.core.files import read_text
from autotune.core.shell_script import SimpleCommand, commands_of
from autotune.core.shell_values import UNKNOWN
from autotune.core.units import MIB
from autotune.request.values import FileChoice

MAX_SCRIPT_BYTES = MIB


def launch_text(choice: FileChoice) -> str:
    """Return the text of a launch script, or the command line that was given instead."""
    if choice.text is not None:
        return choice.text
    if Path(choice.path).suffix == ".toml":  # of prime-rl, which is started with it
        return f"rl @ {shlex.quote(choice.path)}\n"
    return read_text(
        Path(choice.path).expanduser(),
        largest_bytes=MAX_SCRIPT_BYTES,
        way_out="Give the shell script that starts the training.",
    )


def launch_commands(choice: FileChoice, text: str) -> list[SimpleCommand]:
    """Return the commands of a launch, with those of its project's files that it reads."""
    return commands_of(
        text,
        choice.arguments,
        os.environ,
        script=UNKNOWN if choice.text is not None else choice.path,
        reads_files=True,
    )


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
        yield from _ends_of(folder / path)
    yield from _above(Path(script), path)


def _ends_of(path: Path) -> Iterator[Path]:
    """Yield the path without its first folders: `/home/me/project/src/a.py` is `src/a.py` here."""
    _, *parts = path.parts
    while parts:
        yield Path(*parts)
        del parts[0]


def _above(script: Path, path: Path) -> Iterator[Path]:
    """Yield the place below each folder above the script, the nearest first."""
    for folder in script.parents:
        yield folder / path

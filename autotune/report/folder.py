"""The output folder: checked before any GPU time is spent, and filled as a whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import BadInput
from autotune.report.page import PAGE
from autotune.units import MIB

ROOM_BYTES = 32 * MIB
"""Free space that must be there before the search begins; a filtered dataset may take more."""

DOCUMENT = "recommendation.json"
RECOMMENDED = "recommended"

Writer = Callable[[Path], list[Path]]
"""Writes files into a folder and says which."""


def check_folder(out: Path) -> None:
    """That `--out` can be written and has room; leaves no trace in it. Called before anything is measured."""
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is a file.", way_out="Give a folder: --out autotune-out.")
    place = _nearest_existing(out)
    try:
        free = shutil.disk_usage(place).free
        with tempfile.TemporaryFile(dir=place) as trial:
            trial.write(b"\0" * 4096)
    except OSError as error:
        raise BadInput(
            f"--out {out} can't be written: {error.strerror}.", way_out="Give another folder: --out ~/autotune-out."
        ) from None
    if free < ROOM_BYTES:
        raise BadInput(
            f"--out {out} has {free // MIB} MiB left and needs {ROOM_BYTES // MIB}.",
            way_out="Free some space, or give another folder: --out ~/autotune-out.",
        )


def publish(
    out: Path, writer: Writer | None, describe: Callable[[list[str]], Mapping[str, Any]], page: Callable[[Mapping[str, Any]], str]
) -> dict[str, Any]:
    """Write the trainer's files, the page and recommendation.json into `out`, each whole; returns the document.

    Everything is first written beside its place, on the same file system, and only then moved in, so a
    full disk or a fault while writing leaves `out` as it was. recommendation.json comes last: where it
    is, the rest is complete.
    """
    out.mkdir(parents=True, exist_ok=True)
    # Absolute, because trainers answer with absolute paths whatever they were given.
    staging = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=out.resolve()))
    try:
        names = _relative(writer(staging), staging) if writer else []
        _readdress(staging, names, out)
        described = dict(describe([str(out / name) for name in names]))
        (staging / DOCUMENT).write_bytes(_json(described))
        (staging / PAGE).write_text(page(described), encoding="utf-8")
        for name in [*_top_level(names), PAGE, DOCUMENT]:
            _move_in(staging / name, out / name)
    except OSError as error:
        raise BadInput(
            f"The results can't be written into {out}: {error.strerror}.",
            way_out="Free some space and repeat with --resume: nothing is measured twice.",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return described


def annotate(files: list[Path], lines: Sequence[str]) -> list[Path]:
    """Put these lines, as comments, at the head of the recommended configuration; a file that is no YAML is left alone."""
    for file in files:
        if file.stem == RECOMMENDED and file.suffix in (".yaml", ".yml"):
            head = "".join(f"# {line}".rstrip() + "\n" for line in lines)
            file.write_text(head + file.read_text(encoding="utf-8"), encoding="utf-8")
    return files


def _json(described: Mapping[str, Any]) -> bytes:
    import msgspec.json

    return msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n"


def _readdress(staging: Path, names: list[str], out: Path) -> None:
    """Files that name a neighbour (the YAML its dataset) do so by the path at which they were written: make it the final one."""
    was, becomes = str(staging).encode(), str(out.resolve()).encode()
    for file in (staging / name for name in names if name.endswith((".yaml", ".json", ".sh"))):
        content = file.read_bytes()
        if was in content:
            file.write_bytes(content.replace(was, becomes))


def _relative(files: list[Path], folder: Path) -> list[str]:
    return [str(file.resolve().relative_to(folder)) for file in files]


def _top_level(names: list[str]) -> list[str]:
    return list(dict.fromkeys(Path(name).parts[0] for name in names))


def _move_in(source: Path, target: Path) -> None:
    """A rename; an older folder of the same name is taken away first, because rename can't replace a full one."""
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    source.replace(target)


def _nearest_existing(out: Path) -> Path:
    place = out.absolute()
    while not place.exists():
        place = place.parent
    return place

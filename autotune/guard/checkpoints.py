"""The last whole checkpoint of a run.

A checkpoint is torn where its writer was killed or the disk was full. Whole ones have all files of
the framework's layout, and each file that records its own length has it: safetensors, torch's
archives and JSON.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.core.files import write_atomically
from autotune.frameworks.resuming import Pointer, Resuming

MAX_HEADER_BYTES = 100 * 1024 * 1024  # of a safetensors file: the format's own bound
MAX_JSON_BYTES = 64 * 1024 * 1024
ARCHIVES = (".pt", ".pth", ".bin", ".distcp")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    path: Path
    step: int
    written: float  # seconds since the epoch


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoints:
    """The newest whole checkpoint, and newer ones that are torn, with the reason."""

    newest: Checkpoint | None
    torn: tuple[tuple[Checkpoint, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """Checkpoints of one run. Those written before `since` belong to an earlier one."""

    folder: Path  # may contain `*` for unknown parts
    layout: Resuming
    since: float

    def find(self) -> FoundCheckpoints:
        """Return the newest whole checkpoint of this run."""
        torn: list[tuple[Checkpoint, str]] = []
        for checkpoint in self.listed():
            problem = problem_of(checkpoint.path, self.layout)
            if problem is None:
                return FoundCheckpoints(newest=checkpoint, torn=tuple(torn))
            torn.append((checkpoint, problem))
        return FoundCheckpoints(newest=None, torn=tuple(torn))

    def listed(self) -> list[Checkpoint]:
        """Return the checkpoints of this run, whole or not, the highest step first."""
        checkpoints: list[Checkpoint] = []
        for name in self.layout.names:
            checkpoints += self._named(name)
        return sorted(checkpoints, key=lambda checkpoint: -checkpoint.step)

    def _named(self, name: str) -> Iterator[Checkpoint]:
        pattern = name.replace("{step}", "*")
        last_part = re.escape(name.rpartition("/")[2]).replace(r"\{step\}", r"(\d+)")
        for path in _matching(self.folder, pattern):
            number = re.fullmatch(last_part, path.name)
            written = newest_change(path)
            if number is None or written is None or written < self.since:
                continue
            yield Checkpoint(
                path=path,
                step=int(number[1]),
                written=written,
            )

    def point_to(self, checkpoint: Checkpoint) -> None:
        """Have the framework's own pointer name this checkpoint, where it has one."""
        pointer = self.layout.pointer
        if pointer is None:
            return
        file = _pointer_file(self.folder, pointer, checkpoint)
        text = pointer.text.replace("{step}", str(checkpoint.step))
        with contextlib.suppress(OSError):
            if file.is_file() and file.read_text().strip() != text:
                write_atomically(file, text.encode())


def _matching(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the folders that match, where parts of the folder itself may be unknown."""
    parts = folder.parts
    fixed = Path(*parts[: parts.index("*")]) if "*" in parts else folder
    unknown = folder.relative_to(fixed).as_posix() if fixed != folder else ""
    joined = f"{unknown}/{pattern}".strip("/")
    for path in fixed.glob(joined):
        if path.is_dir():
            yield path


def _pointer_file(
    folder: Path,
    pointer: Pointer,
    checkpoint: Checkpoint,
) -> Path:
    """Return the pointer beside the checkpoint: the folder itself may have unknown parts."""
    name = Path(pointer.file)
    if "*" not in folder.parts:
        return folder / name
    return checkpoint.path.parent / name.name


def newest_change(folder: Path) -> float | None:
    """Return the last change of a folder or a file in it; None if it is gone."""
    try:
        times = [folder.stat().st_mtime]
        times += [file.stat().st_mtime for file in folder.rglob("*")]
    except OSError:
        return None
    return max(times)


def problem_of(checkpoint: Path, layout: Resuming) -> str | None:
    """Return why a checkpoint is torn; None: it is whole."""
    for alternatives in layout.complete:
        patterns = [pattern.strip() for pattern in alternatives.split("|")]
        if not any(any(checkpoint.glob(pattern)) for pattern in patterns):
            return f"it has no {patterns[0]}"
    try:
        for file in sorted(checkpoint.rglob("*")):
            problem = _problem_of_file(file) if file.is_file() else None
            if problem is not None:
                return f"{file.relative_to(checkpoint)} {problem}"
    except OSError as error:
        return f"it can't be read: {error.strerror}"
    return None


def _problem_of_file(file: Path) -> str | None:
    size = file.stat().st_size
    if file.suffix == ".safetensors":
        return _problem_of_tensors(file, size)
    if file.suffix in ARCHIVES:
        return None if _is_whole_archive(file, size) else "is cut off"
    if file.suffix == ".json" and size <= MAX_JSON_BYTES:
        try:
            json.loads(file.read_bytes())
        except ValueError:
            return "is cut off"
    return None


def _problem_of_tensors(file: Path, size: int) -> str | None:
    """Compare the length that the header states with the file's."""
    with file.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            return "is cut off"
        (header_bytes,) = struct.unpack("<Q", start)
        if header_bytes > min(MAX_HEADER_BYTES, size):
            return "is cut off"
        try:
            header = json.loads(stream.read(header_bytes))
        except ValueError:
            return "is cut off"
    header.pop("__metadata__", None)
    end = 0
    for tensor in header.values():
        _, end_of_tensor = tensor["data_offsets"]
        end = max(end, end_of_tensor)
    if 8 + header_bytes + end != size:
        return "is cut off"
    return None


def _is_whole_archive(file: Path, size: int) -> bool:
    """Return False for a cut-off zip archive of torch; files of older formats cannot be checked."""
    with file.open("rb") as stream:
        start = stream.read(4)
    if not start:
        return False
    if not start.startswith(b"PK"):
        return True
    return zipfile.is_zipfile(file)

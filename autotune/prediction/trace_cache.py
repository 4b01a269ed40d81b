"""Trace cache on disk: a step that was traced once needs no framework the next time.

Traces are in `$XDG_CACHE_HOME/autotune/traces` (`~/.cache/autotune/traces`), one compressed file
per trace, named by a hash of everything that decides it: specification, package versions and the
tracing code. The folder may be deleted at any time. Several processes may use it at once: each file
is written atomically.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import msgspec

import autotune.worker
from autotune.core.files import FOR_ITS_OWNER, make_private_folder, write_atomically
from autotune.core.trace import Trace
from autotune.core.units import MIB

MAX_FOLDER_BYTES = 512 * MIB  # beyond it the least recently used traces are deleted
# Made on import, before any thread reads: see `read_by_threads`
_DECODER = msgspec.json.Decoder(Trace)


def default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "autotune" / "traces"


class TraceCache:
    """Folder of traces. If it cannot be written, nothing is cached and no error is raised."""

    def __init__(
        self, folder: Path | None = None, *, largest_bytes: int = MAX_FOLDER_BYTES
    ) -> None:
        self.folder = default_folder() if folder is None else folder
        self._largest_bytes = largest_bytes

    def get(self, key: str) -> Trace | None:
        path = self._path(key)
        try:
            packed = path.read_bytes()
        except OSError:
            return None
        try:
            trace = _DECODER.decode(zlib.decompress(packed))
        except (zlib.error, msgspec.DecodeError):  # truncated by a full disk, or an older schema
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # mark as used
        return trace

    def put(self, key: str, trace: Trace) -> None:
        with contextlib.suppress(OSError):
            make_private_folder(self.folder)
            packed = zlib.compress(msgspec.json.encode(trace), 6)
            write_atomically(self._path(key), packed, mode=FOR_ITS_OWNER)
            self._delete_least_recent()

    def _delete_least_recent(self) -> None:
        """Delete the traces beyond the folder's largest size, least recently used first."""
        files: list[tuple[float, int, Path]] = []  # time of last use, size and path
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # deleted by another process
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = 0
        for _, size, path in sorted(files, reverse=True):
            total += size
            if total > self._largest_bytes:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json.z"


def key_of(
    specification: Mapping[str, object],
    versions: Mapping[str, str],
    adapter: str,
) -> str:
    """Return the file name of a trace: a hash of all that decides it."""
    inputs = {
        "specification": specification,
        "versions": _deciding(versions),
        "code": _tracing_code_hash(adapter),
        "model_code": _model_code_hash(specification),
    }
    text = json.dumps(inputs, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _deciding(versions: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that decide a trace: of Python the feature release, since its patches
    change no allocation.
    """
    deciding = dict(versions)
    if "python" in deciding:
        deciding["python"] = ".".join(deciding["python"].split(".")[:2])
    return deciding


def _model_code_hash(specification: Mapping[str, object]) -> str | None:
    """Return a hash of the code that the model brings; None: it is not executed."""
    model = specification.get("model")
    if not specification.get("trust_remote_code") or not isinstance(model, Mapping):
        return None
    if not model.get("folder"):
        return None
    return _hash(sorted(Path(model["folder"]).glob("*.py")))


@cache
def _tracing_code_hash(adapter: str) -> str:
    """Return a hash of the worker's tracing code: any change to it invalidates all traces."""
    worker = Path(autotune.worker.__file__).parent
    files: list[Path] = []
    for pattern in ("tracing/**/*.py", "trl/*.py", "stand_in/*.py", "*.py"):
        files += worker.glob(pattern)
    files.sort()
    if adapter.endswith(".py"):
        files.append(Path(adapter))
    return _hash(files)


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()

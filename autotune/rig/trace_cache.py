"""Traces kept on disk, so that what was followed once needs no framework the next time.

They lie in `$XDG_CACHE_HOME/autotune/traces` (`~/.cache/autotune/traces`), one compressed file per trace, named by a hash of
everything that decides it: what was asked, which packages answered, and our own tracing code. The folder may be deleted at
any time. Several processes may use it at once: a file appears whole or not at all.
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

import autotune.inside
from autotune.files import FOR_ITS_OWNER, put_whole
from autotune.trace import Trace
from autotune.units import MIB

LARGEST_BYTES = 512 * MIB
"""Of the whole folder; what was not used for longest goes first."""

_SUFFIX = ".json.z"

_DECODER = msgspec.json.Decoder(Trace)
"""Made on import, before any thread reads: see `autotune.decoding`."""


def default_folder() -> Path:
    """Where traces are kept unless told otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "autotune" / "traces"


class TraceCache:
    """A folder of traces. One that cannot be written keeps nothing and stops nobody."""

    def __init__(self, folder: Path | None = None, *, largest_bytes: int = LARGEST_BYTES) -> None:
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
        except (zlib.error, msgspec.DecodeError):  # cut short by a full disk, or of a form that is no longer read
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: the last to go
        return trace

    def put(self, key: str, trace: Trace) -> None:
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            put_whole(self._path(key), zlib.compress(msgspec.json.encode(trace), 6), mode=FOR_ITS_OWNER)
            self._make_room()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _make_room(self) -> None:
        kept = sorted(self._kept(), reverse=True)
        total = 0
        for _, size, path in kept:
            total += size
            if total > self._largest_bytes:
                path.unlink(missing_ok=True)

    def _kept(self) -> Iterable[tuple[float, int, Path]]:
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process may be making room as well
                found = path.stat()
                yield found.st_mtime, found.st_size, path


def key_of(specification: Mapping[str, object], versions: Mapping[str, str], adapter: str) -> str:
    """The name of what this question would answer, asked of these packages."""
    asked = {
        "specification": specification,
        "versions": dict(versions),
        "code": _code_of(adapter),
        "model_code": _model_code(specification),
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def _code_of(adapter: str) -> str:
    """Our own side of the tracing: any change to it makes all traces old."""
    inside = Path(autotune.inside.__file__).parent
    files = sorted([*inside.glob("tracing/**/*.py"), *inside.glob("adapters/*.py"), *inside.glob("*.py")])
    return _hash([*files, *([Path(adapter)] if adapter.endswith(".py") else [])])


def _model_code(specification: Mapping[str, object]) -> str | None:
    """Code that comes with the model, where it is to be run."""
    model = specification.get("model")
    folder = model.get("folder") if isinstance(model, Mapping) else None
    return _hash(sorted(Path(folder).glob("*.py"))) if specification.get("trust_remote_code") and folder else None


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()

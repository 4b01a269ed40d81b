"""Temporary folder of a worker. The only module that names files in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "autotune-probe-"


class WorkFolder:
    """Temporary folder, removed by `close`; that of a killed owner, when another opens or closes."""

    def __init__(self, root: Path | None = None) -> None:
        base = Path(tempfile.gettempdir()) if root is None else root
        base.mkdir(parents=True, exist_ok=True)
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._claim = os.open(self.path / "owner", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._claim, fcntl.LOCK_EX)
        self.scratch.mkdir()

    @property
    def scratch(self) -> Path:
        """TMPDIR of the worker's processes."""
        return self.path / "scratch"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def older_log(self) -> Path:
        return self.path / "log.1"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._claim)
        _sweep(self.path.parent)


def _sweep(base: Path) -> None:
    """Remove folders without an owner: the kernel releases a lock however its holder exits."""
    for left in base.glob(f"{_PREFIX}*"):
        try:
            claim = os.open(left / "owner", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # of another user, or not locked yet
            continue
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(claim)

"""Where a rig keeps its files. No other module makes up a file name."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "autotune-rig-"


class RigFolder:
    """A temporary folder that lives as long as its owner: what a killed owner left is swept by who comes next, or goes next."""

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
        """The TMPDIR of everything that runs in the rig."""
        return self.path / "scratch"

    @property
    def log(self) -> Path:
        """What the rig's processes print."""
        return self.path / "log"

    @property
    def older_log(self) -> Path:
        """What they printed before that."""
        return self.path / "log.1"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._claim)
        _sweep(self.path.parent)


def _sweep(base: Path) -> None:
    """Remove folders whose owner is gone: the kernel lets go of a lock however its holder ends."""
    for left in base.glob(f"{_PREFIX}*"):
        try:
            claim = os.open(left / "owner", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # somebody else's, or not claimed yet
            continue
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(claim)

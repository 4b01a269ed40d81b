"""Request to the trainer to save and to stop, before memory runs out.

The request is a file whose text is the number of a step, in a folder that a variable of the command
names. Every rank saves and stops after that step, so that none waits for another. `MemoryWatch`
serves it; other trainers may have a handler of SIGUSR1.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

from autotune.core.files import write_atomically

GUARD_VARIABLE = "AUTOTUNE_GUARD"  # environment variable with the folder of the two files below
REQUEST = "save-after-step"
OBEYED = "saved-after-step"  # written by the trainer that did so

# Between the request and its step: the printed steps are late, and every rank has to see the file.
LEAD_SECONDS = 10.0
LEAD_STEPS = 3
UNKNOWN_LEAD_STEPS = 20


class SaveRequest:
    """The guard's side of the request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_made = False
        self.clear()

    @property
    def variables(self) -> Mapping[str, str]:
        return {GUARD_VARIABLE: str(self.folder.absolute())}

    def clear(self) -> None:
        """Remove both files: they are of an earlier attempt."""
        self.is_made = False
        for name in (REQUEST, OBEYED):
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def make(self, step: int, usual_seconds: float | None) -> int:
        """Ask for a checkpoint; return the step after which it is due."""
        lead = UNKNOWN_LEAD_STEPS
        if usual_seconds is not None:
            lead = max(LEAD_STEPS, math.ceil(LEAD_SECONDS / max(usual_seconds, 1e-3)))
        self.is_made = True
        with contextlib.suppress(OSError):
            write_atomically(self.folder / REQUEST, str(step + lead).encode())
        return step + lead

    @property
    def was_obeyed(self) -> bool:
        return (self.folder / OBEYED).exists()


def requested_step() -> int | None:
    """Return the step after which this process's guard requests a save; None without a request."""
    folder = os.environ.get(GUARD_VARIABLE)
    if folder is None:
        return None
    try:
        return int((Path(folder) / REQUEST).read_text())
    except (OSError, ValueError):
        return None


def note_obeyed(step: int) -> None:
    """Report to the guard that this trainer saved and stopped."""
    folder = os.environ.get(GUARD_VARIABLE)
    if folder is not None:
        with contextlib.suppress(OSError):
            write_atomically(Path(folder) / OBEYED, str(step).encode())

"""Variables of the environment that a script takes its model, rows or places from, and that are not
set here: they are named, and placeholders stand for them where the script stops without them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..tracing.patching import attribute
from .missing_arguments import ABSENT_TEXT, SECRET, IsLibrary, Report

_OF_LAUNCHER = re.compile(
    r"^(?:LOCAL_|NODE_|GROUP_)?RANK$|WORLD_SIZE|MASTER|SLURM|CUDA|NCCL|^HF_|^HUGGING|OMP_"
    r"|ACCELERATE|DEEPSPEED|^LD_|DEBUG|^CI$"
    r"|COLAB|KAGGLE|RAY_|^TRL_"
)
"""Variables of a launcher or of a machine, which a script asks for without need."""

ABSENT_KEY = "absent"
_OF_MODEL = re.compile(r"(?:^|_)(?:MODEL|CHECKPOINT)(?:_(?:NAME|PATH|ID|DIR|OR))*$")
_OF_OUTPUT = re.compile(r"OUT|SAVE|LOG|CACHE")
_OF_PLACE = re.compile(r"DATA|PATH|FILE|DIR|ROOT|INPUT|CORPUS|ROWS|OUT|SAVE|LOG")
_OF_TRACKER = re.compile(r"WANDB|^HF_|HUGGING|COMET|NEPTUNE|CLEARML|SWANLAB|MLFLOW")
_BEHIND_THE_ASKER = (os.__file__, "<frozen os>")


@contextmanager
def seen_by_user(
    model: str | None,
    fills: bool,
    is_library: IsLibrary,
    report: Report,
) -> Iterator[None]:
    """Report variables that the user's files ask for in vain; with `fills`, answer for them."""
    environment_class: Any = type(os.environ)
    get = environment_class.get

    def answered(
        environment: Any,
        name: str,
        default: Any = None,
    ) -> Any:
        value = get(environment, name, default)
        if value is not None or not isinstance(name, str):
            return value
        if is_library(_asker()):
            return _key_of_service(name, report)
        if SECRET.search(name):
            report("unset secret", name)
            return ABSENT_KEY if fills else None
        if _OF_LAUNCHER.search(name):
            return None
        report("unset variable", name)
        return _stands_for(name, model, report) if fills else None

    with attribute(environment_class, "get", answered):
        yield


def _key_of_service(name: str, report: Report) -> str | None:
    """Return a placeholder for the key of a paid service, whose client asks for it when it is
    made; None for another variable, and for the key of a tracker, which would start it.
    """
    if not name.endswith("API_KEY") or _OF_TRACKER.search(name):
        return None
    report("secret", name)
    return ABSENT_KEY


def _stands_for(
    name: str,
    model: str | None,
    report: Report,
) -> str | None:
    """Return a value for a variable; None: it may be a setting."""
    if _OF_MODEL.search(name) and not _OF_OUTPUT.search(name):
        report("model argument", name)
        return model
    if _OF_PLACE.search(name):
        report("argument", f"${name}")
        return ABSENT_TEXT
    return None


def _asker() -> str:
    """Return the file that asks, behind `os.getenv`."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _BEHIND_THE_ASKER:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_code.co_filename)

"""Checkpoints of a framework: where they lie, when one is whole, and the settings that go on from
it. The facts are in each framework's own file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from autotune.core.space import KnobValue

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # to another setting


class Pointer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """File below the folder that names the checkpoint to go on from."""

    file: str
    text: str  # `{step}` in it


class Resuming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layout of the checkpoints, and the way to go on from one.

    In texts, `{step}` is the number of the checkpoint's step, `{checkpoint}` its folder.
    """

    folder_setting: str
    folder: str  # where that setting is not stated; `${name}` is the value of a setting
    names: tuple[str, ...]  # paths of a checkpoint below the folder; `*` is any folder
    complete: tuple[str, ...]
    """Files of a whole checkpoint, as patterns; of alternatives divided by `|`, one is enough."""

    resume: dict[str, KnobValue]  # settings that go on from it; empty: the framework cannot
    pointer: Pointer | None = None
    batch_changes: dict[str, tuple[KnobValue, ...]] = {}
    """Setting -> values with which another micro-batch leaves the number of steps as it is."""

    also: dict[str, KnobValue] = {}  # settings of every restart
    limits: str = ""  # what does not go on where it was

    def folder_of(self, settings: Mapping[str, object]) -> Path:
        """Return the folder of the checkpoints of a run with these stated settings."""
        stated = settings.get(self.folder_setting) or self.folder

        def value_of(reference: re.Match[str]) -> str:
            return str(settings.get(reference[1], "*"))

        filled = _REFERENCE.sub(value_of, str(stated))
        return Path(filled).expanduser()

    def settings_for(self, checkpoint: Path, step: int) -> dict[str, KnobValue]:
        """Return the settings that go on from this checkpoint."""
        path = str(checkpoint.absolute())
        settings: dict[str, KnobValue] = {}
        for name, value in self.resume.items():
            settings[name] = value
            if value == "{step}":
                settings[name] = step
            elif value == "{checkpoint}":
                settings[name] = path
        return settings

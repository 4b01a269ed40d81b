"""The user's own launch script: the training command in it, with the place of each setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StatedSetting:
    """Setting of the command line, as expanded."""

    text: str | None  # None: a switch without a value
    line: int
    span: tuple[int, int] | None  # of the value, or of the word `name=value`; None: not one word of the file
    option: tuple[int, int] | None = None  # of the word `--name`
    prefix: str = ""  # `+` and `++` of Hydra


@dataclass(frozen=True, kw_only=True)
class SharedSetting:
    """Place of a setting whose value others share: while it is stated, they can't have another value."""

    name: str
    targets: tuple[str, ...]
    file: Path | None  # None: an option of the command
    span: tuple[int, int] | None  # of the file's name in the script, or of the option with its value


@dataclass(frozen=True, kw_only=True)
class LaunchScript:
    """Script with its one training command."""

    path: str
    text: str
    framework: str
    method: str
    line: int
    end: int  # offset behind the command's last word
    dotted: bool  # `name=value`, else `--name value`
    stated: Mapping[str, StatedSetting]
    environment: Mapping[str, str] = field(default_factory=dict)
    in_files: bool = False  # settings in configuration files; options are `--name value`, `--name` and `--no-name`
    shared: tuple[SharedSetting, ...] = ()
    former: Mapping[str, str] = field(default_factory=dict)
    """Setting -> its flag, where the command has flags of an earlier release."""

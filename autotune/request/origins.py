"""Origins of settings: which source states a value, and where in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from autotune.core.space import KnobValue


class Source(IntEnum):
    """Sources of settings, in order of precedence: the higher one wins.

    The table in `precedence.py` explains the order.
    """

    FRAMEWORK = 1
    SPACE = 2
    DATA = 3
    FILE_DEFAULT = 4
    VARIABLE = 5
    FILE = 6
    TUNING = 7
    SEARCH = 8
    HOLD = 9
    SET = 10
    FLAG = 11


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Place that states a value."""

    source: Source
    place: str  # flag, path, variable, dataset, or name of the space or framework
    line: int | None = None  # of a file; None: unknown, or no file
    release: str = ""  # `trl 0.14` whose default it is, where the place asks for it

    def __str__(self) -> str:
        return self.place if self.line is None else f"{self.place}, line {self.line}"


@dataclass(frozen=True, kw_only=True)
class HeldSetting:
    """Setting that a source holds at one value."""

    name: str
    value: KnobValue
    origin: Origin


HeldSettings = Mapping[str, HeldSetting]


def by_name(settings: Iterable[HeldSetting]) -> dict[str, HeldSetting]:
    return {setting.name: setting for setting in settings}


def values_of(settings: HeldSettings) -> dict[str, KnobValue]:
    """Return the values by name, without their origins."""
    return {name: setting.value for name, setting in settings.items()}

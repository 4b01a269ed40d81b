"""Settings of a framework as data: name, default, accepted types, choices.

The JSON lists name their source and version. Decoding validates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from autotune.core.space import KnobValue

KINDS = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null"}
TYPE_NAMES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a name", "null": "null"}
FOLDER = Path(__file__).parent


class Field(msgspec.Struct, frozen=True, kw_only=True, rename={"owner": "of", "versions": "in"}):
    """Setting of a framework."""

    kinds: tuple[str, ...]  # accepted types: bool, int, float, str, list, dict, null, other
    default: object
    owner: Literal["script", "config", "model", "mixture"] = "config"
    """TRL class of the setting: script arguments, trainer configuration, ModelConfig or DatasetMixtureConfig."""

    choices: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()  # listed releases that have the setting; empty: all of them
    follows: str | None = None  # setting whose value is the default of this one


class SettingsTable(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one release of a framework."""

    version: str
    fields: dict[str, Field]

    def value(self, settings: Mapping[str, KnobValue], name: str) -> KnobValue:
        """Return the given value, else that of the setting it inherits from, else the default."""
        if settings.get(name) is not None:
            return settings[name]
        if (source := self.fields[name].follows) is not None:
            return self.value(settings, source)
        default = self.fields[name].default
        return default if isinstance(default, bool | int | float | str) else None

    def count(self, settings: Mapping[str, KnobValue], name: str) -> int:
        """Return a whole number; 0 if the setting has none."""
        value = self.value(settings, name)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def share(self, settings: Mapping[str, KnobValue], name: str) -> float:
        value = self.value(settings, name)
        return float(value) if isinstance(value, int | float) else 0.0

    def truth(self, settings: Mapping[str, KnobValue], name: str) -> bool:
        return bool(self.value(settings, name))

    def text(self, settings: Mapping[str, KnobValue], name: str) -> str:
        value = self.value(settings, name)
        return value if isinstance(value, str) else ""

    def problem(self, name: str, value: KnobValue) -> str | None:
        """Return the problem of a value: a wrong type or an unknown choice."""
        if name not in self.fields:
            return None
        field = self.fields[name]
        if KINDS.get(type(value)) not in field.kinds:
            return f"{name}={value} is not {' or '.join(TYPE_NAMES[kind] for kind in field.kinds if kind != 'null')}."
        if field.choices and value not in field.choices:
            return f"{name}={value} is none of {', '.join(field.choices)}."
        return None


def read_yaml(file: str) -> object:
    """Return the content of a YAML file of this folder, by libyaml where PyYAML has it: 14 times faster."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((FOLDER / file).read_text(encoding="utf-8"), loader)


@cache
def read_table(file: str) -> SettingsTable:
    return msgspec.json.decode((FOLDER / file).read_bytes(), type=SettingsTable)

"""A framework's settings as data: name, default, kinds, and which other setting it follows where it is not given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotune.candidate import KnobValue
from autotune.trainers.trl_fields import Field

KINDS = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null"}
WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a name", "null": "null"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """One release's."""

    version: str
    fields: Mapping[str, Field]
    follows: Mapping[str, str]

    @staticmethod
    @cache
    def read(name: str) -> Table:
        content: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
        facts: dict[str, dict[str, Any]] = content["fields"]
        fields = {
            name: Field(
                owner="config", kinds=tuple(fact["kinds"]), default=fact["default"], choices=tuple(fact.get("choices", ()))
            )
            for name, fact in facts.items()
        }
        follows = {name: fact["follows"] for name, fact in facts.items() if "follows" in fact}
        return Table(version=content["version"], fields=MappingProxyType(fields), follows=MappingProxyType(follows))

    def value(self, settings: Mapping[str, KnobValue], name: str) -> KnobValue:
        """As given, as what it follows has it, or the default."""
        if settings.get(name) is not None:
            return settings[name]
        if name in self.follows:
            return self.value(settings, self.follows[name])
        default = self.fields[name].default
        return default if default is None or isinstance(default, bool | int | float | str) else None

    def count(self, settings: Mapping[str, KnobValue], name: str) -> int:
        """A whole number; 0 where there is none."""
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

    def wrong(self, name: str, value: KnobValue) -> str | None:
        """What is wrong with a value of this setting, by its kind and its choices."""
        if name not in self.fields:
            return None
        field = self.fields[name]
        if KINDS.get(type(value)) not in field.kinds:
            return f"{name}={value} is not {' or '.join(WORDS[kind] for kind in field.kinds if kind != 'null')}."
        if field.choices and value not in field.choices:
            return f"{name}={value} is none of {', '.join(field.choices)}."
        return None

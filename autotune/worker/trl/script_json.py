"""Values of a script as JSON holds them, without secrets."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from ..protocol import Result, Settings

SECRETS = frozenset({"hub_token", "push_to_hub_token"})

NOT_JSON = ...
"""Marker in place of a value that JSON cannot hold. None is a value."""


def json_values(values: Settings) -> Result:
    """Return the values that JSON can hold, without secrets."""
    result = {}
    for name, value in values.items():
        if name not in SECRETS:
            json_value = _as_json(value)
            if json_value is not NOT_JSON:
                result[name] = json_value
    return result


def json_or_none(value: Any) -> Any:
    json_value = _as_json(value)
    return None if json_value is NOT_JSON else json_value


def _as_json(value: Any) -> Any:
    """Convert to JSON types; NOT_JSON if that is impossible."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_as_json(item) for item in value]
        return NOT_JSON if NOT_JSON in items else items
    if isinstance(value, Mapping):
        members = {str(name): _as_json(member) for name, member in value.items()}
        return NOT_JSON if NOT_JSON in members.values() else members
    return NOT_JSON

"""Keys of TRL's configuration files, as static lists over the supported TRL releases.

`make field-lists` writes `fields_<method>.json` with `.ci/list_trl_fields.py`.
A test compares them with the installed TRL.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from autotune.frameworks.settings_table import Field


class _FieldList(msgspec.Struct, frozen=True):
    versions: tuple[str, ...]
    fields: dict[str, Field]
    accelerate: frozenset[str]


@cache
def _field_list(method: str) -> _FieldList:
    return msgspec.json.decode(Path(__file__).with_name(f"fields_{method}.json").read_bytes(), type=_FieldList)


def fields(method: str = "grpo") -> Mapping[str, Field]:
    """Return every configuration key that TRL accepts for this method."""
    return _field_list(method).fields


@cache
def accelerate_options() -> frozenset[str]:
    """Return the keys that TRL passes to `accelerate launch`."""
    return _field_list("grpo").accelerate | {"accelerate_config"}


def listed_versions() -> tuple[str, ...]:
    return _field_list("grpo").versions

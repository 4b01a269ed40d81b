"""Keys of TRL's files in former releases: their present names and values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec

from autotune.core.space import KnobValue
from autotune.core.yaml_document import packaged_table


class FormerKeys(msgspec.Struct, frozen=True):
    """Table of former keys: `former_keys.yaml`."""

    renamed: dict[str, str]
    values: dict[str, dict[str, str]]
    left_out: dict[str, str]
    model_names: tuple[str, ...]
    moved: dict[str, KnobValue]
    foreign: dict[str, str]

    def present_name(self, name: str, accepted: Mapping[str, object]) -> str:
        """Return the present name of a key; the name itself if it is none of the former ones."""
        if name in accepted:
            return name
        return self.renamed.get(name, name)

    def present_value(self, name: str, value: object) -> object:
        present_values = self.values.get(name, {})
        return present_values.get(str(value), value)


@cache
def former_keys() -> FormerKeys:
    return packaged_table("autotune.frameworks.trl", "former_keys.yaml", FormerKeys)

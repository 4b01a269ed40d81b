"""Keys of earlier releases, and of open-r1's scripts, in the names of the present ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
import yaml


class FormerKeys(msgspec.Struct, frozen=True):
    """Table of former keys: `former_keys.yaml`."""

    renamed: dict[str, str]
    values: dict[str, dict[str, str]]
    left_out: dict[str, str]

    def present_name(self, name: str, known: Mapping[str, object]) -> str:
        """Return the present name of a key; the name itself if it is none of the former ones."""
        return name if name in known else self.renamed.get(name, name)

    def present_value(self, name: str, value: object) -> object:
        return self.values.get(name, {}).get(str(value), value)


@cache
def former_keys() -> FormerKeys:
    content = yaml.safe_load(Path(__file__).with_name("former_keys.yaml").read_text(encoding="utf-8"))
    return msgspec.convert(content, FormerKeys)

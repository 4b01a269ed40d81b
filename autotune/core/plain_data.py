"""Values of autotune's types as JSON data."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec


def plain(value: object) -> Any:
    """Return a value of these types as JSON data: the serialised form of trials in studies, in
    the store and in benchmarks.
    """
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_plain_other)


def _plain_other(value: object) -> object:
    return dict(value) if isinstance(value, MappingProxyType) else str(value)

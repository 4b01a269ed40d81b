"""TOML files within the limits of other files that users write."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.core.errors import BadInput
from autotune.core.files import MAX_DEPTH, read_text

MAX_BYTES = 1024 * 1024


def read_toml(path: Path) -> Mapping[str, Any]:
    """Read a TOML file; any obstacle becomes a BadInput."""
    text = read_text(path, largest_bytes=MAX_BYTES, way_out="It must be a readable TOML file.")
    try:
        return _shallow(tomllib.loads(text))
    except RecursionError:
        raise BadInput(f"{path} is nested more than {MAX_DEPTH} levels deep.", way_out="Give the original one.") from None
    except ValueError as error:  # broken TOML, and integers of thousands of digits
        what = (str(error).splitlines() or ["no message"])[0][:200]
        raise BadInput(f"{path}: broken TOML: {what}.", way_out="Mend that line.") from None


def _shallow(content: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [
            inner for one in level for inner in (one.values() if isinstance(one, dict) else one) if isinstance(inner, dict | list)
        ]
        if not level:
            return content
    raise RecursionError

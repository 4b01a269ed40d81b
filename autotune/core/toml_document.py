"""TOML files within the limits of other files that users write."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.core.errors import BadInput
from autotune.core.files import read_text, shallow, too_deep

MAX_BYTES = 1024 * 1024
TOO_DEEP = "Give the original one."


def read_toml(path: Path) -> Mapping[str, Any]:
    """Read a TOML file; any obstacle becomes a BadInput."""
    text = read_text(path, largest_bytes=MAX_BYTES, way_out="It must be a readable TOML file.")
    try:
        return shallow(path, tomllib.loads(text), TOO_DEEP)
    except RecursionError:
        raise too_deep(path, TOO_DEEP) from None
    except ValueError as error:  # broken TOML, and integers of thousands of digits
        what = (str(error).splitlines() or ["no message"])[0][:200]
        raise BadInput(f"{path}: broken TOML: {what}.", way_out="Mend that line.") from None

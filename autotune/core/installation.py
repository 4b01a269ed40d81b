"""Origin of this installation, for commands that add to it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "grpo-autotune"  # name in pyproject.toml


def pip_requirement(extra: str) -> str:
    """Return what `pip install` takes for this extra, quoted for a shell: the clone or file that
    autotune was installed from. It is on no package index, so that its name alone finds nothing.
    """
    return shlex.quote(f"{_source()}[{extra}]")


def _source() -> str:
    clone = Path(__file__).resolve().parents[2]
    if (clone / "pyproject.toml").is_file():
        return str(clone)
    # Imported here: only an error message needs it.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        recorded = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        recorded = None
    if not recorded:
        return DISTRIBUTION
    address = urlsplit(json.loads(recorded)["url"])
    if address.scheme != "file":
        return str(address.geturl())
    return unquote(address.path)

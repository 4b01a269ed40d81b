"""Reading an answer's document from disk, and writing its page there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.files import read_json, write_whole
from autotune.units import MIB

LARGEST_BYTES = 256 * MIB
"""A document of thousands of trials has a few megabytes."""


def read_document(source: Path) -> dict[str, Any]:
    """The JSON object in this file."""
    way_out = "Name the folder that `autotune run` wrote, or its recommendation.json."
    return read_json(source, dict[str, Any], largest_bytes=LARGEST_BYTES, way_out=way_out)


def write_page(target: Path, page: str) -> None:
    write_whole(target, page.encode(), way_out="Name another: --to ~/report.html.")

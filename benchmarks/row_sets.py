"""Sets of rows in foresight-rows.json: the first, and models that were added later. Each has
results of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUFFIXES = {"first": "", "second": "-second"}
"""Set of rows -> ending of its results' name."""


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--set` to the arguments."""
    parser.add_argument(
        "--set",
        choices=list(SUFFIXES),
        default="first",
        help="rows added later are a set of their own",
    )


def chosen(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the rows of this set."""
    return [row for row in rows if row.get("set", "first") == name]


def write(
    document: Mapping[str, Any],
    page: str,
    folder: Path,
    name: str,
    of: str,
) -> None:
    """Write the results `name` of the set `of`, as JSON and as a page."""
    folder.mkdir(parents=True, exist_ok=True)
    name += SUFFIXES[of]
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / f"{name}.md").write_text(page)

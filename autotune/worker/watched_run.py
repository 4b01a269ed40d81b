"""Models inside the processes of a launched run: its environment and the results.

A request may contain a table:

    "watch": {"steps": ["module:Class.method", ...],            after it, the state of an optimizer step exists
              "uses": ["module:Class.method", ...],             the same in processes that do not train
              "holders": [{"cls": "module:Class",               objects of this class or of a subclass
                           "noted": true,                       recorded at construction; else found by a search
                           "models": {"policy": "path.to.it", "reference": "..."},
                           "optimizer": "path.to.it" | null}, ...]}

Each Python process of the run starts with `startup/sitecustomize.py`, through which
`model_watch.py` waits for these classes. Each process writes its figures into a folder of the run;
`found` merges them by rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .model_watch import OUTPUT_VARIABLE, TABLE_VARIABLE

STARTUP = Path(__file__).resolve().parent / "startup"
FOLDER = "models"


def environment(watch: Any, folder: Path, before: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the run's environment `before`; none without a table."""
    if not watch:
        return {}
    (folder / FOLDER).mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(STARTUP), before.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, TABLE_VARIABLE: json.dumps(watch), OUTPUT_VARIABLE: str(folder / FOLDER)}


def found(folder: Path) -> list[dict[str, Any]]:
    """Return the bytes by rank and part; processes of one rank are added up."""
    ranks: dict[int, dict[str, int]] = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        parts = ranks.setdefault(int(report["rank"]), {})
        for name, size in report["bytes"].items():
            parts[name] = parts.get(name, 0) + int(size)
    return [{"rank": rank, "bytes": parts} for rank, parts in sorted(ranks.items()) if parts]

"""The models of a run that is only started, seen from inside its own processes; this is the side that starts it.

A request may say where to look:

    "watch": {"steps": ["module:Class.method", ...],            right after which a step's state is there
              "uses": ["module:Class.method", ...],             the same in processes that train nothing
              "holders": [{"cls": "module:Class",               an object of this class or of one made from it
                           "noted": true,                       to be noted when it is made, else searched for
                           "models": {"policy": "path.to.it", "reference": "..."},
                           "optimizer": "path.to.it" | null}, ...]}

Every Python process of the run starts with `start/sitecustomize.py`, which lets `watch.py` wait for those classes. What a process
saw it writes into a folder of the run's own, and here the processes' figures are put together rank by rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .watch import TABLE, WHERE

START = Path(__file__).resolve().parent / "start"
FOLDER = "models"


def environment(watch: Any, folder: Path, before: Mapping[str, str]) -> dict[str, str]:
    """What the run's environment must have beside what it has `before`; nothing where nobody wants to look."""
    if not watch:
        return {}
    (folder / FOLDER).mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(START), before.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, TABLE: json.dumps(watch), WHERE: str(folder / FOLDER)}


def found(folder: Path) -> list[dict[str, Any]]:
    """What was seen, rank by rank: processes of one rank hold models side by side."""
    ranks: dict[int, dict[str, int]] = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        parts = ranks.setdefault(int(told["rank"]), {})
        for name, size in told["bytes"].items():
            parts[name] = parts.get(name, 0) + int(size)
    return [{"rank": rank, "bytes": parts} for rank, parts in sorted(ranks.items()) if parts]

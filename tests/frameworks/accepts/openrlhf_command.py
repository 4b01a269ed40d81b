"""OpenRLHF's command line as `train_ppo_ray.py` understands it: all of that file but the
training, which it ends with.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any


def understood() -> Any:
    """Its arguments, from `sys.argv`, parsed and checked by its own last lines."""
    spec = importlib.util.find_spec("openrlhf.cli.train_ppo_ray")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "train":
            node.body = ast.parse("UNDERSTOOD.append(args)").body
    parsed: list[Any] = []
    exec(compile(tree, spec.origin, "exec"), {"__name__": "__main__", "UNDERSTOOD": parsed})
    return parsed[0]

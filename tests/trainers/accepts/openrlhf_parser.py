"""OpenRLHF's own command line, parser and checks: everything in train_ppo_ray.py but the training. Prints what it understood.

Run by a Python that has OpenRLHF; arguments are those of `python -m openrlhf.cli.train_ppo_ray`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import absent  # type: ignore[import-not-found]

absent.stand_in()
spec = importlib.util.find_spec("openrlhf.cli.train_ppo_ray")
assert spec is not None and spec.origin is not None
tree = ast.parse(Path(spec.origin).read_text())
for node in tree.body:
    if isinstance(node, ast.FunctionDef) and node.name == "train":
        node.body = ast.parse("UNDERSTOOD.update({'args': args})").body
understood: dict[str, object] = {}
exec(compile(tree, spec.origin, "exec"), {"__name__": "__main__", "UNDERSTOOD": understood})


def plain(value: object) -> object:
    fields = getattr(value, "__dict__", None)
    return {name: plain(each) for name, each in fields.items()} if fields is not None else value


print(understood["args"])  # as `strategy.print(args)` does, before anything is loaded
print(json.dumps(plain(understood["args"]), default=str))

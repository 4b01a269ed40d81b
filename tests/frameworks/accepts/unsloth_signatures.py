"""Signatures in unsloth's own source: the arguments of its two functions, and the fields that it
adds to TRL's configurations.

Read from the source and not imported: unsloth does not start without a GPU. Run by a Python that
has unsloth.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from importlib.metadata import version
from pathlib import Path

spec = importlib.util.find_spec("unsloth")
assert spec is not None and spec.origin is not None
models = Path(spec.origin).parent / "models"


def arguments(
    file: str,
    owner: str,
    function: str,
) -> list[str]:
    tree = ast.parse((models / file).read_text())
    body = next(
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner
    )
    definition = next(
        node for node in body if isinstance(node, ast.FunctionDef) and node.name == function
    )
    return [argument.arg for argument in (*definition.args.args, *definition.args.kwonlyargs)]


print(
    json.dumps(
        {
            "version": version("unsloth"),
            "from_pretrained": arguments("loader.py", "FastLanguageModel", "from_pretrained"),
            "get_peft_model": arguments("llama.py", "FastLlamaModel", "get_peft_model"),
            "added": sorted(
                set(re.findall(r"\bunsloth_\w+(?= : Optional)", (models / "rl.py").read_text()))
            ),
        }
    )
)

"""slime's own options and checks on a command line. Prints what it understood as JSON.

    python slime_arguments.py REPOSITORY WORDS...

Its module imports SGLang and Megatron, which need CUDA. So its functions are executed alone, and
Megatron's and SGLang's options, whose values are not checked, are added as plain ones.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

ROOT, WORDS = Path(sys.argv[1]), sys.argv[2:]
WANTED = {"reset_arg", "get_slime_extra_args_provider", "slime_validate_args"}


def main() -> None:
    tree = ast.parse((ROOT / "slime/utils/arguments.py").read_text(encoding="utf-8"))
    functions: list[ast.stmt] = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in WANTED
    ]
    scope: dict[str, Any] = {
        "argparse": argparse,
        "json": json,
        "os": os,
        "logger": logging.getLogger(),
        "_resolve_eval_datasets": lambda args: [],
    }
    exec(compile(ast.Module(functions, []), "arguments.py", "exec"), scope)
    parser = scope["get_slime_extra_args_provider"]()(argparse.ArgumentParser(allow_abbrev=False))
    parser.add_argument("--train-backend", default="megatron")
    known = {option for action in parser._actions for option in action.option_strings}
    for place, word in enumerate(WORDS):
        if word.startswith("--") and word not in known:
            known.add(word)
            switch = place + 1 == len(WORDS) or WORDS[place + 1].startswith("--")
            parser.add_argument(word, **({"action": "store_true"} if switch else {}))
    args = parser.parse_args(WORDS)
    args.debug_rollout_only = args.debug_train_only = False
    args.load_debug_rollout_data = None
    scope["slime_validate_args"](args)
    print(
        json.dumps(
            {
                name: value
                for name, value in vars(args).items()
                if isinstance(value, str | int | float | None)
            }
        )
    )


if __name__ == "__main__":
    main()

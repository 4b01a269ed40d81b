"""ms-swift without a package that it imports."""

from __future__ import annotations

import os
import runpy
import sys

sys.argv = [
    "sft.py",
    "--model",
    os.environ["PROVOKE_MODEL"],
    "--model_type",
    "qwen2",
    "--dataset",
    "rows.jsonl",
]
runpy.run_module("swift.cli.sft", run_name="__main__")

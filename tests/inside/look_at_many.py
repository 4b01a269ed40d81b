"""Looks at one script after the other, each in a fork, so that the framework is imported once.

python tests/inside/look_at_many.py < [{"script": ..., "arguments": [...]}, ...]   ->   a JSON list on the last line
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.inside.drive import inside


def main() -> None:
    requests = json.load(sys.stdin)
    look = inside("adapters.trl_script_look")
    inside("adapters.trl_imports").without_vllm()
    for name in ("trl", "peft", "datasets"):
        importlib.import_module(name)
    inside("adapters.trl_script_catch").classes_of("grpo")
    answers = []
    for request in requests:
        with tempfile.TemporaryDirectory() as folder:
            told, asked = Path(folder) / "told", Path(folder) / "asked"
            asked.write_text(json.dumps(request))
            if os.fork() == 0:
                sys.stdin = asked.open()
                with told.open("w") as file:
                    os.dup2(file.fileno(), 1)
                    look.main()
            os.wait()
            answers.append(json.loads(told.read_text()))
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()

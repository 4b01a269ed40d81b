"""Inspects several scripts, each in a fork, so that the framework is imported once.

python tests/worker/look_at_many.py < [{"script": ..., "arguments": [...]}, ...]
    ->   a JSON list on the last line
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.worker.drive import inside


def main() -> None:
    requests = json.load(sys.stdin)
    look = inside("trl.script_look")
    inside("trl.vllm_engines").without_vllm()
    for name in ("trl", "peft", "datasets"):
        importlib.import_module(name)
    inside("trl.methods").RUNS_BY_METHOD["grpo"].classes()
    answers = []
    for request in requests:
        with tempfile.TemporaryDirectory() as folder:
            reply = Path(folder) / "reply"
            request_file = Path(folder) / "request"
            request_file.write_text(json.dumps({**request, "parent": os.getpid()}))
            if os.fork() == 0:
                sys.stdin = request_file.open()
                with reply.open("w") as file:
                    os.dup2(file.fileno(), 1)
                    look.main()
            os.wait()
            answers.append(json.loads(reply.read_text()))
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()

"""Tracer of generic steps in the environment that runs it; every one in a fork, because patches
persist.

python benchmarks/foresight_tracer.py SPECIFICATIONS.json FOLDER

One file per specification is written to FOLDER: `{"trace": ...}` or `{"error": "..."}`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

SECONDS = 150
"""CPU seconds after which a step is given up, independent of the machine's load. The longest
takes a tenth of it.
"""

HANGS_SECONDS = 10 * SECONDS
"""Wall seconds after which a process hangs."""

HERE = Path(__file__).resolve().parent


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    specifications = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2])
    adapter = importlib.import_module("autotune.worker.stand_in.trace")
    adapter.warm({})
    for name, specification in specifications.items():
        follow(adapter, specification, folder / f"{name}.json")
    return 0


def follow(
    adapter: Any,
    specification: Any,
    answer: Path,
) -> None:
    """Trace in a child process, so that the patches of one specification end with it."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(HANGS_SECONDS)
    try:
        if specification["method"] != "generic":
            adapter = importlib.import_module("autotune.worker.trl.step_trace")
            adapter.warm({"model": specification["model"]})
        outcome = {"trace": adapter.trace(specification)}
    except BaseException as error:
        details = traceback.format_exc(limit=-6) if os.environ.get("FORESIGHT_DEBUG") else ""
        outcome = {"error": f"{type(error).__name__}: {str(error)[:600]}{details}"}
    begun = answer.with_suffix(
        ".part"
    )  # a file that is there is whole, whenever somebody ends this
    begun.write_text(json.dumps(outcome))
    begun.rename(answer)
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())

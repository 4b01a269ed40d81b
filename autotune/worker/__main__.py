"""Entry point: `python .../autotune/worker --adapter trl.grpo_probe --packages trl,torch --fd 5`,
or with the name of one of the `PROGRAMS`, such as `... look` for the inspection of a user's script.

The folder is loaded as the package `autotune_worker`. Nothing else of autotune becomes importable,
and no module of the user collides with ours.
"""

import sys

if sys.version_info < (3, 9):  # noqa: UP036
    sys.stderr.write(
        "autotune: the training environment needs Python 3.9 or newer; this is %s\n"  # noqa: UP031
        % sys.version.split()[0]
    )
    sys.exit(3)

import importlib.util
import os
from pathlib import Path

PROGRAMS = {
    "look": "trl.script_look",
    "prompts": "dataset_sizes",
    "rows": "dataset_sizes",
    "images": "dataset_sizes",
    "keep": "keeper",
}
"""Programs that answer one request: JSON on stdin, JSON on stdout. `keep` reads its arguments."""

if __name__ == "__main__":
    # 1. The folder becomes the package `autotune_worker`; the working directory is last on
    # `sys.path`.
    folder = Path(__file__).resolve().parent
    for entry in tuple(sys.path):
        if Path(entry or ".").resolve() == folder:
            sys.path.remove(entry)
    if os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.append(os.getcwd())  # noqa: PTH109
    spec = importlib.util.spec_from_file_location(
        "autotune_worker", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["autotune_worker"] = package
    spec.loader.exec_module(package)
    # 2. The program
    if len(sys.argv) > 1 and sys.argv[1] in PROGRAMS:
        importlib.import_module("autotune_worker." + PROGRAMS[sys.argv[1]]).main()
    else:
        importlib.import_module("autotune_worker.main_loop").main(sys.argv[1:])

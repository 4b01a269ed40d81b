"""Hook that Python runs at the start of each process of a watched run, Ray's workers included.

An error here must not reach the run. The environment's own `sitecustomize` still runs afterwards.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

PACKAGE = "autotune_worker"
HERE = Path(__file__).resolve().parent


def watch() -> None:
    if PACKAGE not in sys.modules:
        worker = HERE.parent
        spec = importlib.util.spec_from_file_location(
            PACKAGE, worker / "__init__.py", submodule_search_locations=[str(worker)]
        )
        if spec is None or spec.loader is None:
            return
        package = sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    importlib.import_module(f"{PACKAGE}.model_watch").begin()


def run_next() -> None:
    """Run the `sitecustomize` that this one hides, unless it ran already: that of emulated cards
    does the same.
    """
    folders_that_ran = sys.__dict__.setdefault("autotune_sitecustomize", set())
    folders_that_ran.add(HERE)
    path = []
    for entry in sys.path:
        if Path(entry or ".").resolve() not in folders_that_ran:
            path.append(entry)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


try:
    watch()
except Exception as error:
    sys.stderr.write(f"autotune: the models of this process are not measured: {error!r}\n")
run_next()

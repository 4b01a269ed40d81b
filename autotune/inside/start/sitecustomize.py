"""Python runs this at the start of every process of a watched run, Ray's workers among them: see `autotune.inside.watched`.

Whatever goes wrong here must not reach the run, and a module of this name that the environment has of its own still has its turn.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

PACKAGE = "autotune_inside"
HERE = Path(__file__).resolve().parent


def watch() -> None:
    if PACKAGE not in sys.modules:
        inside = HERE.parent
        found = importlib.util.spec_from_file_location(PACKAGE, inside / "__init__.py", submodule_search_locations=[str(inside)])
        if found is None or found.loader is None:
            return
        package = sys.modules[PACKAGE] = importlib.util.module_from_spec(found)
        found.loader.exec_module(package)
    importlib.import_module(f"{PACKAGE}.watch").begin()


def hand_on() -> None:
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if found is not None and found.loader is not None:
        found.loader.exec_module(importlib.util.module_from_spec(found))


try:
    watch()
except Exception as error:
    sys.stderr.write(f"autotune: the models of this process are not looked at: {error!r}\n")
hand_on()

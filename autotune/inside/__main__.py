"""Start of the keeper: `python .../autotune/inside --adapter trl_grpo --packages trl,torch --fd 5`; or, with `look`, of a first
look at the user's own script.

The folder is loaded as the package `autotune_inside`, whatever its real place, so that nothing else
of autotune becomes importable here and no module of the user's can collide with ours.
"""

import sys

if sys.version_info < (3, 9):  # noqa: UP036 -- this file must be able to say so in any Python 3
    sys.stderr.write("autotune: the training environment needs Python 3.9 or newer; this is %s\n" % sys.version.split()[0])  # noqa: UP031
    sys.exit(3)

import importlib.util
import os
from pathlib import Path


def load_package() -> None:
    """Make `autotune_inside` importable, and the user's own modules in the working directory after everything installed."""
    folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    if os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.append(os.getcwd())  # noqa: PTH109
    spec = importlib.util.spec_from_file_location(
        "autotune_inside", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["autotune_inside"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    load_package()
    if sys.argv[1:] == ["look"]:
        importlib.import_module("autotune_inside.adapters.trl_script_look").main()
    else:
        importlib.import_module("autotune_inside.keeper").main(sys.argv[1:])

"""An environment without packages that many tests do not use and whose import takes seconds.

A process that imports TRL takes 10.6 CPU seconds with vLLM and bitsandbytes installed, 6.1 seconds
without them, as in an environment that never had them; without scipy, which transformers imports
for the loss of a detector, a second less. Processes of these tests start with `sitecustomize.py` of
this folder, which hides the three.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def light_python_path(*folders: Path) -> str:
    """Return a PYTHONPATH that hides the packages, with these folders and today's behind it."""
    path = [str(FOLDER), *map(str, folders)]
    if "PYTHONPATH" in os.environ:
        path.append(os.environ["PYTHONPATH"])
    return os.pathsep.join(path)

"""Writes a metrics file as verl does: with its own FileLogger, where VERL_FILE_LOGGER_PATH says.

Run by a Python that has verl. The argument is the steps' metrics as JSON. Of verl this file of its
own alone is executed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy

package = importlib.util.find_spec("verl")
assert package is not None and package.submodule_search_locations
file = Path(package.submodule_search_locations[0]) / "utils" / "tracking.py"
spec = importlib.util.spec_from_file_location("tracking", file)
assert spec is not None and spec.loader is not None
tracking = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tracking)
logger = tracking.FileLogger("project", "experiment")
for step, metrics in enumerate(json.loads(sys.argv[1]), start=1):
    logger.log({name: numpy.float32(value) for name, value in metrics.items()}, step)
logger.finish()
print(json.dumps(str(file)))

"""Prints a step's line as OpenRLHF's trainer does: in its own words, by its own logger.

Run by a Python that has openrlhf. The argument is the steps' figures as JSON. The words are taken
from the trainer's source, which does not import without vLLM; so are the names of the figures, each
of which must stand there.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

package = importlib.util.find_spec("openrlhf")
assert package is not None and package.submodule_search_locations
root = Path(package.submodule_search_locations[0])
spec = importlib.util.spec_from_file_location("logging_utils", root / "utils" / "logging_utils.py")
assert spec is not None and spec.loader is not None
logging_utils = importlib.util.module_from_spec(spec)
spec.loader.exec_module(logging_utils)
logger = logging_utils.init_logger("openrlhf.trainer.ppo_trainer")

source = (root / "trainer" / "ppo_trainer.py").read_text(encoding="utf-8")
log_call = re.search(r"logger\.info\((f\".*Global step.*\")\)", source)
assert log_call is not None
for number, status in enumerate(json.loads(sys.argv[1]), start=1):
    assert all(f'"{name}"' in source for name in status), [
        name for name in status if f'"{name}"' not in source
    ]
    logger.info(eval(log_call[1], {"global_step": number, "log_status": status}))

"""NeMo-RL's own configuration: its file with what it inherits, and overrides by its own parser.
Prints what it understood.

Run by a Python that has hydra; the first argument is a clone of its repository. `nemo_rl` itself is
not imported: it needs Python 3.13, and its configuration's module needs neither.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from omegaconf import OmegaConf

root, *overrides = sys.argv[1:]
spec = importlib.util.spec_from_file_location(
    "nemo_rl_config", Path(root) / "nemo_rl/utils/config.py"
)
assert spec is not None and spec.loader is not None
config = importlib.util.module_from_spec(spec)
spec.loader.exec_module(config)
config.register_omegaconf_resolvers()
words = overrides[overrides.index("--config") :]
loaded = config.load_config(Path(root) / words[1])
print(
    json.dumps(
        OmegaConf.to_container(config.parse_hydra_overrides(loaded, words[2:]), resolve=True)
    )
)

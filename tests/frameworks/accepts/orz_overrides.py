"""Print as JSON how Hydra reads `exp.key=value`, called as in Open-Reasoner-Zero's
`BaseExp.set_cfg`.

Run by a Python that has hydra; arguments are the overrides. Needs nothing of the repository.
"""

from __future__ import annotations

import json
import sys

from hydra._internal.config_loader_impl import ConfigLoaderImpl  # type: ignore[import-not-found]
from hydra.core.override_parser import overrides_parser  # type: ignore[import-not-found]
from omegaconf import OmegaConf  # type: ignore[import-not-found]

config = OmegaConf.create()
ConfigLoaderImpl._apply_overrides_to_config(
    overrides_parser.OverridesParser.create().parse_overrides(overrides=sys.argv[1:]), config
)
print(json.dumps(OmegaConf.to_container(config)))

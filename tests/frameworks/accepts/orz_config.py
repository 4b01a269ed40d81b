"""Open-Reasoner-Zero's own experiment: its configuration class with the overrides that were typed.
Prints what it came to.

Run by a Python that has hydra, with the repository on PYTHONPATH; the first argument is the
experiment's module, the others are `exp.key=value`.
"""

from __future__ import annotations

import importlib
import json
import sys

import absent  # type: ignore[import-not-found]

absent.GPU_ONLY = (*absent.GPU_ONLY, "ray", "orz.ppo", "orz.exp_engine")
absent.stand_in()
from omegaconf import ListConfig  # type: ignore[import-not-found]  # noqa: E402

# Its dataclasses have lists as defaults, which only Python 3.10 takes: later ones go by whether the
# class can be hashed.
ListConfig.__hash__ = object.__hash__

module, *overrides = sys.argv[1:]
sys.argv = [module, *overrides]
scope = vars(importlib.import_module(module))
experiment = scope["PPOExp"]().set_cfg(scope["PPOExpConfig"]())
print(
    "2025-02-20 10:00:01.000 | INFO | __main__:<module>:1 -"
    f" {experiment.get_cfg_as_str(experiment.cfg)}"
)
config = {
    name: getattr(experiment.cfg, name) for name in dir(experiment.cfg) if not name.startswith("_")
}
print(
    json.dumps(
        {
            name: value
            for name, value in config.items()
            if isinstance(value, (bool, int, float, str, type(None)))
        }
    )
)

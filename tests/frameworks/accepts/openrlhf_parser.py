"""OpenRLHF's own command line, parser and checks: everything in train_ppo_ray.py but the training.
Prints what it understood.

Run by a Python that has OpenRLHF; arguments are those of `python -m openrlhf.cli.train_ppo_ray`.
"""

from __future__ import annotations

import json

import absent  # type: ignore[import-not-found]
from openrlhf_command import understood  # type: ignore[import-not-found]

absent.stand_in()


def plain(value: object) -> object:
    fields = getattr(value, "__dict__", None)
    return {name: plain(field) for name, field in fields.items()} if fields is not None else value


arguments = understood()
print(arguments)  # as `strategy.print(args)` does, before anything is loaded
print(json.dumps(plain(arguments), default=str))

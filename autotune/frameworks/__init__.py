"""Trainers: one per framework and method, behind the interface of `base`.

Each file lists its trainers in TRAINERS. Another package registers such a list with an entry
point of the group `autotune.frameworks`: see docs/adding-a-framework.md.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from autotune.core.errors import UnknownName
from autotune.frameworks import command, nemo_rl, open_reasoner_zero, openrlhf, prime_rl, skyrl, slime, swift, unsloth, verl
from autotune.frameworks.base import Trainer
from autotune.frameworks.trl import trainers as trl

ENTRY_POINT_GROUP = "autotune.frameworks"
_FILES = (trl, swift, verl, openrlhf, open_reasoner_zero, skyrl, prime_rl, nemo_rl, slime, unsloth, command)


@cache
def trainers() -> dict[tuple[str, str], Trainer]:
    """Return every trainer by framework and method."""
    own = [each for file in _FILES for each in file.TRAINERS]
    registered = [each for entry in entry_points(group=ENTRY_POINT_GROUP) for each in entry.load()]
    return {(each.name, each.method): each for each in (*own, *registered)}


def trainer(name: str, method: str = "grpo") -> Trainer:
    """Return the trainer of `--framework` and `--method`."""
    frameworks = {framework for framework, _ in trainers()}
    if name not in frameworks:
        raise UnknownName("framework", name, frameworks)
    if (name, method) not in trainers():
        raise UnknownName("method", method, [each for framework, each in trainers() if framework == name])
    return trainers()[name, method]

"""Trainers: one per framework and method. What each must answer is in `base`; how to add one, in docs/adding-a-framework.md.

A file of this folder says what it has in TRAINERS; another package does it with an entry point of the group `autotune.frameworks`
whose value is such a list.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from autotune.errors import UnknownName
from autotune.trainers import command, open_reasoner_zero, openrlhf, swift, trl, trl_online_dpo, trl_other, trl_ppo, unsloth, verl
from autotune.trainers.base import Trainer

GROUP = "autotune.frameworks"
_FILES = (trl, trl_other, trl_online_dpo, trl_ppo, swift, verl, openrlhf, open_reasoner_zero, unsloth, command)


@cache
def known() -> dict[tuple[str, str], Trainer]:
    """Every trainer, by framework and method."""
    ours = [one for file in _FILES for one in file.TRAINERS]
    others = [one for entry in entry_points(group=GROUP) for one in entry.load()]
    return {(one.name, one.method): one for one in (*ours, *others)}


def trainer(name: str, method: str = "grpo") -> Trainer:
    """The trainer that `--framework` and `--method` name."""
    frameworks = {framework for framework, _ in known()}
    if name not in frameworks:
        raise UnknownName("framework", name, frameworks)
    if (name, method) not in known():
        raise UnknownName("method", method, [each for framework, each in known() if framework == name])
    return known()[name, method]

"""Trainers: one per framework. What each must answer is in `base`."""

from __future__ import annotations

from autotune.errors import UnknownName
from autotune.trainers.base import Trainer
from autotune.trainers.trl import TrlGrpo

_TRAINERS: dict[tuple[str, str], Trainer] = {("trl", "grpo"): TrlGrpo()}


def trainer(name: str, method: str = "grpo") -> Trainer:
    """The trainer that `--framework` and `--method` name."""
    frameworks = {framework for framework, _ in _TRAINERS}
    if name not in frameworks:
        raise UnknownName("framework", name, frameworks)
    if (name, method) not in _TRAINERS:
        raise UnknownName("method", method, [known for framework, known in _TRAINERS if framework == name])
    return _TRAINERS[name, method]

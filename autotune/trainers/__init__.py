"""Trainers: one per framework. What each must answer is in `base`."""

from __future__ import annotations

from autotune.errors import UnknownName
from autotune.trainers.base import Trainer
from autotune.trainers.open_reasoner_zero import OpenReasonerZero
from autotune.trainers.openrlhf import OpenRlhf
from autotune.trainers.trl import TrlGrpo
from autotune.trainers.trl_other import TrlForesight
from autotune.trainers.verl import Verl

_TRAINERS: dict[tuple[str, str], Trainer] = {
    ("trl", "grpo"): TrlGrpo(),
    **{("trl", method): TrlForesight(method) for method in ("rloo", "sft", "dpo")},
    **{(kind.name, method): kind(method) for kind in (Verl, OpenRlhf, OpenReasonerZero) for method in ("grpo", "ppo")},
}


def trainer(name: str, method: str = "grpo") -> Trainer:
    """The trainer that `--framework` and `--method` name."""
    frameworks = {framework for framework, _ in _TRAINERS}
    if name not in frameworks:
        raise UnknownName("framework", name, frameworks)
    if (name, method) not in _TRAINERS:
        raise UnknownName("method", method, [known for framework, known in _TRAINERS if framework == name])
    return _TRAINERS[name, method]

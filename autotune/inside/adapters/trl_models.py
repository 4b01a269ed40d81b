"""Which models a trainer of TRL's has, and what they hold on this rank: `weighing` says what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import weighing
from ..weighing import Held

OTHERS = (("critic", "value_model"), ("reference", "ref_model"), ("reward", "reward_model"))
"""Roles, and the trainer's own names for them."""


def weigh(trainer: Any) -> dict[str, int]:
    return weighing.weigh(_models(trainer), trainer.accelerator.device.type)


def _models(trainer: Any) -> Iterator[Held]:
    """The policy last: what others share with it is theirs too, and nobody's twice."""
    unwrap, optimizer = trainer.accelerator.unwrap_model, trainer.optimizer
    for role, name in OTHERS:
        model = getattr(trainer, name, None)
        if hasattr(model, "parameters"):
            yield Held(role=role, model=unwrap(model), optimizer=optimizer)
    for reward in getattr(trainer, "reward_funcs", None) or ():
        if hasattr(reward, "parameters"):
            yield Held(role="reward", model=unwrap(reward), optimizer=optimizer)
    yield Held(role="", model=policy_of(trainer), optimizer=optimizer)


def policy_of(trainer: Any) -> Any:
    """What is trained; PPO's trainer has it in one module with its critic."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return getattr(model, "policy", model)

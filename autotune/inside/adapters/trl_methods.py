"""TRL's methods: what runs each, where its trainer lies, and what a probe hooks into there."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import trl_online, trl_ppo, trl_versions
from .trl_offline import DpoRun, SftRun
from .trl_run import Run


class RlooRun(Run):
    """GRPO's loop with another advantage, and another loss."""

    names = ("RLOOConfig", "RLOOTrainer")


@dataclass(frozen=True)
class Method:
    """One of TRL's trainers."""

    run: type[Run]
    module: str
    hooks: tuple[str, ...]
    """Methods of the trainer by which phases, lengths and tokens are known."""

    newest: str = trl_versions.NEWEST
    """The last release that has it."""


OFFLINE_HOOKS = ("_prepare_dataset", "compute_loss")

METHODS: Mapping[str, Method] = {
    "grpo": Method(Run, "trl.trainer.grpo_trainer", trl_versions.HOOKED_METHODS),
    "rloo": Method(RlooRun, "trl.trainer.rloo_trainer", trl_versions.HOOKED_METHODS),
    "sft": Method(SftRun, "trl.trainer.sft_trainer", OFFLINE_HOOKS),
    "dpo": Method(DpoRun, "trl.trainer.dpo_trainer", OFFLINE_HOOKS),
    "ppo": Method(trl_ppo.PpoRun, trl_ppo.MODULE, trl_ppo.HOOKS, trl_ppo.NEWEST),
    "online-dpo": Method(trl_online.OnlineDpoRun, trl_online.MODULE, trl_online.HOOKS),
}


def method_of(request: Mapping[str, Any]) -> Method:
    return METHODS[str(request.get("method") or "grpo")]


def trainer_of(request: Mapping[str, Any]) -> Any:
    """The method's own trainer class, imported."""
    method = method_of(request)
    try:
        return getattr(importlib.import_module(method.module), method.run.names[1])
    except (ModuleNotFoundError, AttributeError) as error:
        raise trl_versions.UnsupportedFramework(
            trl_versions.without(method.run.names[1], method.module, method.newest)
        ) from error

"""TRL's training methods: the run of each, and its trainer in a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import seams
from .async_grpo_method import AsyncGrpoRun, TracedAsyncGrpo
from .offline_methods import DpoRun, KtoRun, RewardRun, SftRun, TracedDpo, TracedKto, TracedReward, TracedSft
from .online_dpo_method import OnlineDpoRun, TracedOnlineDpo
from .ppo_method import PpoRun
from .traced_method import TracedGroups, TracedMethod, TracedRloo
from .trainer_run import TrainerRun


class RlooRun(TrainerRun):
    """GRPO's loop with another advantage and another loss."""

    module, names = seams.RLOO, ("RLOOConfig", "RLOOTrainer")


@dataclass(frozen=True)
class Method:
    """One of TRL's trainers."""

    run: type[TrainerRun]
    traced: TracedMethod | None  # None: never traced
    newest: str = seams.NEWEST  # last release that has it
    oldest: str = seams.OLDEST
    in_scripts: bool = True  # scripts of the user's own may construct it


METHODS: Mapping[str, Method] = {
    "grpo": Method(TrainerRun, TracedGroups()),
    "rloo": Method(RlooRun, TracedRloo()),
    "sft": Method(SftRun, TracedSft()),
    "dpo": Method(DpoRun, TracedDpo()),
    "kto": Method(KtoRun, TracedKto(), oldest=seams.KTO_OLDEST),
    "reward": Method(RewardRun, TracedReward()),
    "ppo": Method(PpoRun, None, newest=seams.PPO_NEWEST, in_scripts=False),
    "online-dpo": Method(OnlineDpoRun, TracedOnlineDpo(), in_scripts=False),
    "async-grpo": Method(AsyncGrpoRun, TracedAsyncGrpo(), oldest=seams.ASYNC_OLDEST),
}


def method_of(request: Mapping[str, Any]) -> Method:
    return METHODS[str(request.get("method") or "grpo")]


def trainer_of(request: Mapping[str, Any]) -> Any:
    """Import the method's trainer class."""
    method = method_of(request)
    try:
        return method.run.classes()[1]
    except (ModuleNotFoundError, AttributeError) as error:
        import trl

        trainer, module = method.run.names[1], method.run.module
        raise seams.UnsupportedFramework(
            f"TRL {trl.__version__} has no {trainer} in {module}; releases {method.oldest} to {method.newest} have: "
            f"pip install 'trl=={method.newest}'"
        ) from error

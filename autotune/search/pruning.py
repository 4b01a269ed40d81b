"""Pruner of Optuna: a probe is stopped early once its candidate cannot become the best.

    objective: trial.report(tokens_per_second_of_the_cycle, step=cycle)
               if trial.should_prune(): raise optuna.TrialPruned

In the probes of autotune the worker decides by the same rule after each cycle, with the speed to
reach as part of the plan: a question to the driver would stop every rank. What it measured is
reported cycle by cycle afterwards.
"""

from __future__ import annotations

import optuna
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial

from autotune.core.answer import Purpose
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate
from autotune.search.sampler import PredictedSampler
from autotune.search.surrogate.throughput_model import median_scatter
from autotune.search.trial_storage import PURPOSE
from autotune.search.trial_view import TrialView, speed_of
from autotune.worker.phase_recorder import out_of_reach

# Share of the tier's best speed below which a probe is stopped early. A closer one may turn out
# better.
PRUNE_SHARE = 0.95
PRUNED_PURPOSES: tuple[Purpose, ...] = ("search", "refused")
"""A baseline, an anchor and a confirmation are measured whole."""


class SlowProbePruner(BasePruner):
    """Prunes trials whose reported speeds stay below the best of their tier."""

    def __init__(self, sampler: PredictedSampler) -> None:
        self._sampler = sampler

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        candidate = self._sampler.parameters.candidate_of(trial.params)
        if candidate is None:
            return False
        view = self._sampler.view(study)
        goal = speed_to_reach(view, trial.user_attrs.get(PURPOSE, "search"), candidate)
        if goal is None:
            return False
        rates = [rate for _, rate in sorted(trial.intermediate_values.items())]
        return out_of_reach(rates, goal=goal, spread=cycle_spread(view))


def speed_to_reach(
    view: TrialView,
    purpose: Purpose,
    candidate: Candidate,
) -> float | None:
    """Return the tokens per second that the candidate must be able to reach; None if its probe is
    not stopped early.
    """
    if purpose not in PRUNED_PURPOSES or not view.problem.surrogate.options.prune:
        return None
    rivals = view.same_tier_contenders(candidate)
    if not rivals:
        return None
    return PRUNE_SHARE * speed_of(rivals[0])


def cycle_spread(view: TrialView) -> float:
    """Return the usual spread between cycles on this machine, for the stop rule."""
    scatter = median_scatter(view.completed) or 0.0
    return max(scatter, ProbePlan().cycle_spread)

"""Pruning: a probe is stopped early once its candidate cannot become the best. A pure function of
the trials.
"""

from __future__ import annotations

from autotune.core.answer import Purpose
from autotune.core.space import Candidate
from autotune.search.trial_view import TrialView, speed_of

# Share of the tier's best speed below which a probe is stopped early. A closer one may turn out
# better.
PRUNE_SHARE = 0.95
PRUNED_PURPOSES: tuple[Purpose, ...] = ("search", "refused")
"""A baseline, an anchor and a confirmation are measured whole."""


def speed_to_reach(
    view: TrialView,
    purpose: Purpose,
    candidate: Candidate,
) -> float | None:
    """Return the tokens per second that the candidate must be able to reach; None if its probe is
    not stopped early.
    """
    prunes = view.problem.surrogate.options.prune
    if purpose not in PRUNED_PURPOSES or not prunes:
        return None
    rivals = view.same_tier_contenders(candidate)
    if not rivals:
        return None
    return PRUNE_SHARE * speed_of(rivals[0])
